"""Tensors to files and back, by the planners of torch.distributed.checkpoint: who writes which piece, and which slices of which pieces a rank reads.

    write   every rank plans what it holds → all plans together: a replica is written once, replicas spread by size → each rank writes its file
    read    each rank alone: its own boxes against the saved pieces, whatever placement they were saved from

Only the bytes of tensors go through here, and never more than one tensor is copied at a time.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from partitioner.errors import CheckpointError
from partitioner.runtime.checkpoint_files import disk
from partitioner.runtime.checkpoint_manifest import Entry, Piece
from partitioner.runtime.checkpoint_sources import Source
from partitioner.runtime.shards import local
from partitioner.runtime.together import Peers

ALIGN_BYTES = 64
"""Pieces start at such multiples, so that a mapped file can be viewed in any dtype."""


@dataclass(frozen=True)
class Written:
    """What one rank wrote: its file's name and checksum (None: nothing), and the pieces by tensor."""

    file: str | None
    digest: str
    pieces: tuple[tuple[str, str, tuple[int, ...], Piece], ...]  # name, dtype, shape of the whole, piece


def write(tensors: Mapping[str, Tensor], folder: Path, peers: Peers) -> tuple[dict[str, Entry], dict[str, str]]:
    """Write every rank's share into `folder`; all tensors with their pieces, and the checksum of each file. Collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan() -> SavePlan:
        planner.set_up_planner(_present(tensors), is_coordinator=peers.rank == 0)
        return planner.create_local_plan()

    plans = peers.together(plan)

    def perform() -> Written:
        shares, _ = planner.create_global_plan(plans)
        return _write_file(folder / f"rank-{peers.rank:05d}.bin", planner.finish_plan(shares[peers.rank]), planner)

    everyone = peers.together(perform)
    found: dict[str, tuple[str, tuple[int, ...], list[Piece]]] = {}
    for written in everyone:
        for name, dtype, shape, piece in written.pieces:
            found.setdefault(name, (dtype, shape, []))[2].append(piece)
    entries = {name: Entry(dtype=dtype, shape=shape, pieces=tuple(pieces)) for name, (dtype, shape, pieces) in sorted(found.items())}
    return entries, {written.file: written.digest for written in everyone if written.file is not None}


def read(targets: Mapping[str, Tensor], source: Source) -> None:
    """Fill the targets, on this rank, from the entries of the same names and shapes."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(entry.torch_dtype),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in entry.pieces],
            )
            for name in targets
            if (entry := source.entries[name])
        }
    )
    planner.set_up_planner(dict(_present(targets)), metadata, is_coordinator=True)
    pieces = {name: {piece.offsets: piece for piece in source.entries[name].pieces} for name in targets}
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            box = [slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(source.slice(name, pieces[name][offset], box))


def _present(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the tensors of which this rank has no rows, or nothing at all."""
    held = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    return {name: tensor for name, tensor in held.items() if not isinstance(tensor, DTensor) or local(tensor).numel()}


def _write_file(path: Path, plan: SavePlan, planner: DefaultSavePlanner) -> Written:
    if not plan.items:
        return Written(None, "", ())
    digest, at, pieces = hashlib.sha256(), 0, []
    with disk(path, "written"), open(path, "xb") as file:
        for item in plan.items:
            data, found = item.tensor_data, planner.resolve_data(item)
            if data is None or not isinstance(found, Tensor):
                raise CheckpointError(f"{item.index.fqn!r} is no tensor, so it cannot be written to {path}")
            flat = found.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
            padding = bytes(-at % ALIGN_BYTES)
            data_bytes: Any = flat.numpy()
            for part in (padding, data_bytes):
                file.write(part)
                digest.update(part)
            at += len(padding)
            piece = Piece(file=path.name, byte=at, offsets=tuple(data.chunk.offsets), sizes=tuple(data.chunk.sizes))
            pieces.append((item.index.fqn, str(data.properties.dtype).removeprefix("torch."), tuple(data.size), piece))
            at += flat.numel()
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, digest.hexdigest(), tuple(pieces))
