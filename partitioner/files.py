"""Reading files that strangers wrote and writing files that must never be half there."""

import os
import stat
import tempfile
from pathlib import Path

from partitioner.errors import PartitionerError


def read_text(path: Path, limit_bytes: int, error: type[PartitionerError], what: str) -> str:
    """The text of a regular file of at most `limit_bytes` bytes; `error` otherwise. Never blocks on a pipe, never reads a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"the {what} {path} cannot be read ({reason}); give the path of an existing file") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"{path} is no regular file, so it can be no {what}; give the path of a file")
    with open(descriptor, "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise error(f"{path} holds {max(status.st_size, len(data)):,} bytes; a {what} has at most {limit_bytes:,}")
    try:
        return data.decode("utf-8-sig")  # editors that write a byte order mark mean no harm
    except UnicodeDecodeError as problem:
        raise error(f"{path} is no UTF-8 text (byte {problem.start}), so it can be no {what}") from None


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: readers see the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
