"""Saving and loading a training run: model, optimizer, random numbers, step and plan, on any number of ranks and any placement.

    save   1 all describe what they save     2 rank 0 begins a version, all see its folder     3 all plan and write their shares
           4 rank 0 adds manifest and checksums and publishes
    load   1 all open the files and compare what they see     2 each checks a share of them     3 all compare with the model and the optimizer
           4 each reads its slices

Every numbered step ends on all ranks together, with success or with the error of the rank that failed. Folders and checksums are in
checkpoint_files.py, the manifest in checkpoint_manifest.py, other kinds of files in checkpoint_sources.py, pieces of tensors in
checkpoint_tensors.py, names in checkpoint_state.py.
"""

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from partitioner.errors import CheckpointError
from partitioner.runtime import checkpoint_files as files
from partitioner.runtime import checkpoint_state as parts
from partitioner.runtime.checkpoint_manifest import FORMAT, Manifest
from partitioner.runtime.checkpoint_sources import Source, open_source
from partitioner.runtime.checkpoint_tensors import read, write
from partitioner.runtime.together import Peers

PathLike = str | os.PathLike[str]


def load_checkpoint(path: PathLike, model: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Load what `parallel.save` wrote, on any number of ranks, into a plain model and a plain torch optimizer in this one process.

    path: the folder that was saved to (its newest version), or one version in it; also a file of `torch.save(model.state_dict(), …)`, a
    .safetensors file, or a folder of them. Returns the number of train steps done (0 for weights alone). Random numbers go on as in the saved run.

    A checkpoint that holds an optimizer wants it here too, unless the model is in evaluation: then its weights are loaded alone.
    Raises CheckpointError for files that are damaged, unfinished, or of another model or optimizer; then nothing has been changed.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise CheckpointError("the model's parameters are cut over ranks; write parallel.load(path, optimizer) on every rank")
    for name, tensor in parts.model_state(model).tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name!r} of the model is on the meta device and cannot be filled; write model.to_empty(device=…) first")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return load(path, model, optimizer, Peers(), device)


def save(path: PathLike, module: nn.Module, optimizer: Optimizer | None, step: int, plan: str, peers: Peers, device: torch.device) -> Path:
    """Write a new version into the folder `path` and return it. plan: its text, or "". Parameters on `meta` are those of other stages. Collective."""
    folder = Path(path)

    collected: list[tuple[Manifest, dict[str, Tensor]]] = []

    def collect() -> tuple[str, parts.StateOf]:
        state = parts.model_state(module)
        record, of_each, moments = (None, {}, {}) if optimizer is None else parts.optimizer_state(optimizer, module)
        skeleton = Manifest(format=FORMAT, step=step, ranks=peers.ranks, tensors={}, values=state.values)
        skeleton = skeleton.model_copy(update={"aliases": state.aliases, "optimizer": record})  # their tensors come later
        tensors = {f"model/{name}": tensor.detach() for name, tensor in state.tensors.items()}
        collected.append((skeleton, {**tensors, **moments, **parts.random_state(peers.rank, device)}))
        return hashlib.sha256(f"{os.fspath(path)} {skeleton.model_dump_json()}".encode()).hexdigest(), of_each

    told = peers.together(collect)
    of_all = parts.joined([of_each for _, of_each in told])
    if len({digest for digest, _ in told}) > 1 or of_all is None:
        raise CheckpointError(
            "the ranks save different things: another path, optimizer, learning rate or number of steps; call save alike on every rank"
        )
    skeleton, tensors = collected[0]
    if skeleton.optimizer is not None:
        skeleton = skeleton.model_copy(update={"optimizer": skeleton.optimizer.model_copy(update={"state": of_all})})
    writing = peers.first(lambda: files.begin(folder, step))
    try:
        peers.together(lambda: _seen(writing, peers.rank))
        entries, digests = write(tensors, writing, peers)

        def publish() -> Path:
            manifest = skeleton.model_copy(update={"tensors": entries})
            texts = {files.MANIFEST: manifest.model_dump_json(), **({files.PLAN: plan} if plan else {})}
            return files.finish(writing, texts, digests)

        return peers.first(publish)
    except Exception:
        if peers.rank == 0:
            files.give_up(writing)
        raise


def load(path: PathLike, module: nn.Module, optimizer: Optimizer | None, peers: Peers, device: torch.device) -> int:
    """Fill module and optimizer, as they are placed, and return the number of steps done. Collective."""
    opened: list[Source] = []

    def look() -> str:
        opened.append(open_source(path))
        return opened[0].digest

    if len(set(peers.together(look))) > 1:
        raise CheckpointError(
            f"the ranks see different files at {os.fspath(path)!r}: give a folder on a file system that all ranks share, or put the same on each"
        )
    source = opened[0]
    peers.together(lambda: source.check(peers.rank, peers.ranks))
    state = parts.model_state(module)
    manifest = source.manifest
    saved = None if manifest is None else manifest.optimizer
    values = {} if manifest is None else manifest.values

    def match() -> dict[str, Tensor]:
        _fits(optimizer, manifest, module, source)
        targets = parts.match_model(state, source.entries, values, source.path)
        if optimizer is not None and saved is not None:
            targets |= parts.optimizer_targets(optimizer, module, saved, source.entries, source.path)
        if manifest is not None and (saved is None or optimizer is not None):
            targets |= parts.random_targets(peers.rank, peers.ranks, manifest.ranks, device, source.entries)
        return targets

    matched: list[dict[str, Tensor]] = []
    peers.together(lambda: matched.append(match()))
    (targets,) = matched

    def fill() -> None:
        with files.disk(source.path, "read"):
            read(targets, source)
        parts.put_values(module, state, values)
        if optimizer is not None and saved is not None:
            parts.put_optimizer(optimizer, module, saved, targets, source.entries)
        parts.put_random({name: tensor for name, tensor in targets.items() if name.startswith("random/")}, device)

    peers.together(fill)
    return 0 if manifest is None else manifest.step


def _seen(folder: Path, rank: int) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {folder}, which rank 0 has made: every rank writes its part there, so the path must lie on a file system that "
            "all ranks share"
        )


def _fits(optimizer: Optimizer | None, manifest: Manifest | None, module: nn.Module, source: Source) -> None:
    """Whether an optimizer is given where one is saved, and only there."""
    if manifest is None:
        if optimizer is not None:
            raise CheckpointError(f"{source.path} holds weights alone and no state for the optimizer; leave the optimizer out")
    elif manifest.optimizer is None:
        if optimizer is not None:
            raise CheckpointError(f"{source.path} was saved without an optimizer, so there is no state for it; leave the optimizer out")
    elif optimizer is None and module.training:
        raise CheckpointError(
            f"{source.path} holds the state of {manifest.optimizer.kind}, without which training would not go on as it was; pass the optimizer "
            "as well, or call .eval() first to load the weights alone"
        )
