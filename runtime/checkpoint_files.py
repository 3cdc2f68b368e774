"""Versions of a checkpoint in one folder: written beside the others, made durable, published by one rename, checked by checksums, pruned.

    ckpt/
      000006-step-1100/            the version before, kept in case
      000007-step-1200/            the newest: highest number first
        manifest.json              what is saved, in which bytes of which file
        plan.json                  the plan, for Plan.load
        rank-00000.bin, …          tensors, written by that rank
        SHA256SUMS                 of all of these; `sha256sum -c SHA256SUMS` checks them at the shell
      .writing-000008-step-1300-…  a save that was cut short: never loaded, removed by the next save

A version is there whole or not at all: the rename comes last, after every file and folder has been flushed to the disk.
"""

import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from partitioner.errors import CheckpointError

KEPT_VERSIONS = 2
"""The newest and the one before it; older ones are removed once a new one is published."""

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
PLAN = "plan.json"
MOST_TEXT_BYTES = 1 << 30  # of a manifest; a file from a stranger must not fill the memory

_VERSION = re.compile(r"(\d{6,12})-step-(\d+)")
_WRITING = ".writing-"
_LINE = re.compile(r"([0-9a-f]{64})  (manifest\.json|plan\.json|rank-\d{5,9}\.bin)")


@contextmanager
def disk(path: Path, doing: str) -> Iterator[None]:
    """Turn what the operating system refuses into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be {doing} ({error.strerror or error}); give a folder that this process may use, with room"
        ) from error


def versions(folder: Path) -> list[Path]:
    """Published versions, oldest first."""
    found = [(match, path) for path in folder.iterdir() if (match := _VERSION.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the next version into. What interrupted saves left behind is removed."""
    with disk(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_WRITING}*"):
            shutil.rmtree(left, ignore_errors=True)
        last = versions(folder)[-1:]
        number = 1 + int(last[0].name.split("-")[0]) if last else 1
        writing = folder / f"{_WRITING}{number:06d}-step-{step}-{secrets.token_hex(4)}"
        writing.mkdir()
    return writing


def finish(writing: Path, texts: Mapping[str, str], digests: Mapping[str, str]) -> Path:
    """Add the texts (file name -> content) and the checksums, publish, prune; the published version. digests: of the files already there."""
    with disk(writing, "written"):
        sums = dict(digests)
        for name, text in texts.items():
            data = text.encode()
            sums[name] = hashlib.sha256(data).hexdigest()
            _write(writing / name, data)
        _write(writing / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode())
        _flush(writing)
        published = writing.parent / writing.name.removeprefix(_WRITING).rsplit("-", 1)[0]
        os.rename(writing, published)
        _flush(published.parent)
    for old in versions(published.parent)[:-KEPT_VERSIONS]:
        try:  # under a name that is no version's, so that half of one is never taken for a whole
            gone = old.rename(old.with_name(f"{_WRITING}{old.name}-removed"))
            shutil.rmtree(gone)
        except OSError as error:
            warnings.warn(f"{published} is saved, but the old version {old} could not be removed ({error.strerror})", stacklevel=2)
    return published


def give_up(writing: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(writing, ignore_errors=True)


def is_version(path: Path) -> bool:
    return (path / SUMS).exists() or (path / MANIFEST).exists() or _VERSION.fullmatch(path.name) is not None


def newest(folder: Path) -> Path | None:
    """The version to load from a checkpoint's folder; None where the folder holds none and is no checkpoint."""
    found = versions(folder)
    if found:
        return found[-1]
    if left := sorted(folder.glob(f"{_WRITING}*")):
        raise CheckpointError(f"{folder} holds no finished checkpoint: the only save was cut short ({left[0].name}); save again")
    return None


def read_sums(version: Path) -> tuple[dict[str, str], str]:
    """File name -> checksum as the version lists them, and one digest of the whole list."""
    if not (version / SUMS).is_file():
        raise damaged(version, f"{SUMS} is missing")
    text = read_text(version / SUMS)
    if not text.endswith("\n"):
        raise damaged(version, f"{SUMS} is cut off")
    sums = {}
    for line in text.split("\n")[:-1]:
        match = _LINE.fullmatch(line)
        if match is None:
            raise damaged(version, f"{SUMS} has the line {line[:80]!r}")
        sums[match[2]] = match[1]
    return sums, hashlib.sha256(text.encode()).hexdigest()


def check(version: Path, sums: Mapping[str, str], names: list[str]) -> None:
    """Raise CheckpointError for a file that is not there or not as it was written."""
    for name in names:
        if name not in sums or not (version / name).is_file():
            raise damaged(version, f"{name} is missing")
        with disk(version / name, "read"), open(version / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sums[name]:
            raise damaged(version, f"{name} is not as it was written (its checksum differs)")


def read_text(path: Path) -> str:
    """A text file of bounded size."""
    with disk(path, "read"):
        if path.stat().st_size > MOST_TEXT_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, more than any manifest; it is not a checkpoint's")
        data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise damaged(path.parent, f"{path.name} is no text (byte {error.start})") from None


def damaged(version: Path, what: str) -> CheckpointError:
    """The error to raise; it names the version to load instead, if there is one."""
    known = versions(version.parent)
    older = known[: known.index(version)] if version in known else []
    return CheckpointError(f"{version} is damaged: {what}" + (f"; to go on from the version before it, load {str(older[-1])!r}" if older else ""))


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
