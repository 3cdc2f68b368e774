"""Files that tensors are read from, slice by slice: a version of ours, a state dict of torch.save, safetensors of Hugging Face.

Files are mapped into memory, so a rank reads the pages of its own slices and no more. Nothing is unpickled but by torch's weights_only reader.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from partitioner.errors import CheckpointError
from partitioner.runtime import checkpoint_files as files
from partitioner.runtime.checkpoint_manifest import Entry, Manifest, Piece, parse

INDEX = "model.safetensors.index.json"
SAFETENSORS = ".safetensors"


class Source(Protocol):
    """entries: tensors by name, as in a manifest. digest: equal where ranks see the same files. manifest: None where there are weights alone."""

    @property
    def path(self) -> Path: ...

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    @property
    def digest(self) -> str: ...

    @property
    def manifest(self) -> Manifest | None: ...

    def slice(self, name: str, piece: Piece, box: Sequence[slice]) -> Tensor:
        """A box of a piece, on the CPU; its memory may be the file's."""
        ...

    def check(self, rank: int, ranks: int) -> None:
        """Compare this rank's share of the files with their checksums, where there are any."""
        ...


class Version:
    """A version that `checkpoint.save` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sums, self.digest = files.read_sums(path)
        files.check(path, self._sums, [files.MANIFEST])
        self.manifest: Manifest | None = (manifest := parse(files.read_text(path / files.MANIFEST), path / files.MANIFEST))
        self.entries: Mapping[str, Entry] = {
            **manifest.tensors,
            **{f"model/{alias}": manifest.tensors[f"model/{name}"] for alias, name in manifest.aliases.items()},
        }
        self._mapped: dict[str, Tensor] = {}
        for name, entry in manifest.tensors.items():
            for piece in entry.pieces:
                if prod(piece.sizes) and piece.file not in self._sums:
                    raise files.damaged(path, f"{name!r} lies in {piece.file}, which {files.SUMS} does not list")

    def check(self, rank: int, ranks: int) -> None:
        files.check(self.path, self._sums, sorted(self._sums)[rank::ranks])

    def slice(self, name: str, piece: Piece, box: Sequence[slice]) -> Tensor:
        dtype = self.entries[name].torch_dtype
        mapped = self._file(piece.file)
        size = prod(piece.sizes) * dtype.itemsize
        if piece.byte % dtype.itemsize or piece.byte + size > mapped.numel():
            raise files.damaged(self.path, f"{name!r} does not lie in {piece.file} where {files.MANIFEST} says")
        return mapped.narrow(0, piece.byte, size).view(dtype).view(piece.sizes)[tuple(box)]

    def _file(self, name: str) -> Tensor:
        if name not in self._mapped:
            path = self.path / name
            with files.disk(path, "read"):
                size = path.stat().st_size
            self._mapped[name] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return self._mapped[name]


class StateDict:
    """A file that holds a `state_dict()`, written by torch.save."""

    manifest: Manifest | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.disk(path, "read"), open(path, "rb"):
            pass
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path} is no state dict that can be read without running code from it ({str(error).splitlines()[0][:200]}); give a file that "
                "torch.save(model.state_dict(), …) wrote, a .safetensors file, or the folder that parallel.save wrote"
            ) from None
        self._tensors = _tensors_of(loaded, path)
        self.entries = {f"model/{name}": _entry(tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}
        self.digest = _digest(self.entries, [path])

    def check(self, rank: int, ranks: int) -> None:
        pass

    def slice(self, name: str, piece: Piece, box: Sequence[slice]) -> Tensor:
        return self._tensors[name.removeprefix("model/")][tuple(box)]


class Safetensors:
    """One .safetensors file, or the several of a folder, as Hugging Face writes them."""

    manifest: Manifest | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise CheckpointError(
                f"{path} is read by the package safetensors, which is not installed; write: pip install 'torch-partitioner[safetensors]'"
            ) from None
        listed = _listed(path)
        self._open: dict[str, Any] = {}
        entries: dict[str, Entry] = {}
        for file, names in listed.items():
            try:
                with files.disk(file, "read"):
                    opened: Any = safe_open(file, framework="pt", device="cpu")
                for name in opened.keys() if names is None else names:
                    part = opened.get_slice(name)
                    whole = opened.get_slice(name)[tuple(slice(0, 0) for _ in part.get_shape())]  # for its dtype
                    entries[f"model/{name}"] = _entry(whole.dtype, part.get_shape())
                    self._open[f"model/{name}"] = opened
            except SafetensorError as error:
                raise CheckpointError(f"{file} is damaged or no safetensors file: {error}") from None
        self.entries = entries
        self.digest = _digest(entries, listed)

    def check(self, rank: int, ranks: int) -> None:
        pass

    def slice(self, name: str, piece: Piece, box: Sequence[slice]) -> Tensor:
        part: Tensor = self._open[name].get_slice(name.removeprefix("model/"))[tuple(box)]
        return part


def open_source(given: str | os.PathLike[str]) -> Source:
    """Whatever lies at a path. Raises CheckpointError where there is nothing that can be loaded."""
    path = Path(given)
    with files.disk(path, "read"):
        if path.is_dir():
            if files.is_version(path):
                return Version(path)
            if (path / INDEX).exists() or list(path.glob(f"*{SAFETENSORS}")):
                return Safetensors(path)
            version = files.newest(path)
            if version is not None:
                return Version(version)
            raise CheckpointError(f"{path} holds neither a checkpoint of parallel.save nor {SAFETENSORS} files; give the path that was saved to")
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give the folder that parallel.save wrote, a state dict's file, or safetensors")
    return Safetensors(path) if path.suffix == SAFETENSORS else StateDict(path)


def _tensors_of(loaded: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a state dict; write torch.save(model.state_dict(), path)")
    for name, value in loaded.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            what = f"a {type(value).__name__}" if not isinstance(value, Tensor) else "a sparse tensor"
            raise CheckpointError(
                f"{path} holds {what} under {name!r}, not only tensors; write torch.save(model.state_dict(), path), the weights alone"
            )
    return dict(loaded)


def _listed(path: Path) -> dict[Path, list[str] | None]:
    """File -> the tensors to read from it; None for all that it holds."""
    if path.is_file():
        return {path: None}
    if not (path / INDEX).exists():
        found = sorted(path.glob(f"*{SAFETENSORS}"))
        if len(found) > 1:
            raise CheckpointError(f"{path} holds {len(found)} {SAFETENSORS} files but no {INDEX} that lists their tensors; give one of the files")
        return dict.fromkeys(found)
    try:
        weights = json.loads(files.read_text(path / INDEX))["weight_map"]
        listed: dict[Path, list[str] | None] = {}
        for name, file in weights.items():
            if Path(file).name != file or not file.endswith(SAFETENSORS):
                raise ValueError(f"the file name {file!r}")
            names = listed.setdefault(path / file, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX} is no index of {SAFETENSORS} files: {error}") from None
    return listed


def _entry(dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    sizes = tuple(shape)
    return Entry(dtype=str(dtype).removeprefix("torch."), shape=sizes, pieces=(Piece(file="", byte=0, offsets=(0,) * len(sizes), sizes=sizes),))


def _digest(entries: Mapping[str, Entry], paths: Iterable[Path]) -> str:
    seen = (sorted((name, entry.dtype, entry.shape) for name, entry in entries.items()), [(path.name, path.stat().st_size) for path in paths])
    return hashlib.sha256(repr(seen).encode()).hexdigest()
