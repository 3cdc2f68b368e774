"""Checkpoints: a run goes on elsewhere as if it had never stopped; what is of another model or optimizer is refused before anything changes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples import resume
from partitioner import Plan, load_checkpoint
from partitioner.errors import CheckpointError, PartitionerError
from partitioner.runtime import checkpoint
from partitioner.runtime.checkpoint_sources import open_source
from partitioner.runtime.parameters import UnitStore
from partitioner.runtime.program import Unit
from partitioner.runtime.shards import local
from partitioner.runtime.together import Peers
from tests import ranks
from tests.checkpoint_support import Model, adamw, load_and_train, place, save_plain, steps, train_and_save, train_plain

CPU = torch.device("cpu")


def test_a_run_goes_on_over_other_ranks_and_in_one_plain_process(tmp_path: Path) -> None:
    expected = train_plain(range(7))
    undisturbed = ranks.run(2, train_and_save, 2, "zero3", tmp_path, range(3), range(3, 5))
    resumed = ranks.run(3, load_and_train, 3, "zero1", tmp_path, range(3, 5), True)
    assert all(losses == pytest.approx(expected[3:5], rel=1e-12) for losses in [*undisturbed, *resumed])
    for version, done in (("000001-step-3", 3), ("000002-step-5", 5)):
        model = Model()
        optimizer = adamw(model)
        assert load_checkpoint(tmp_path / version, model, optimizer) == done
        assert steps(model, optimizer, range(done, 7)) == pytest.approx(expected[done:], rel=1e-12)
        assert Plan.load(tmp_path / version / "plan.json").ranks == {3: 2, 5: 3}[done]


STAGES = {"pp": 2, "dp": 2, "shard": "zero3"}
INTERLEAVED = {"pp": 2, "schedule": "interleaved"}


def test_a_run_goes_on_over_stages_and_back(tmp_path: Path) -> None:
    expected = train_plain(range(9))
    undisturbed = ranks.run(4, train_and_save, 4, STAGES, tmp_path, range(3), range(3, 5))
    flat = ranks.run(3, load_and_train, 3, "zero1", tmp_path, range(3, 5), True)
    staged = ranks.run(2, load_and_train, 2, INTERLEAVED, tmp_path, range(5, 7), True)
    assert all(losses == pytest.approx(expected[3:5], rel=1e-12) for losses in [*undisturbed, *flat])
    assert all(losses == pytest.approx(expected[5:7], rel=1e-12) for losses in staged)
    model = Model()
    optimizer = adamw(model)
    assert load_checkpoint(tmp_path, model, optimizer) == 7
    assert steps(model, optimizer, range(7, 9)) == pytest.approx(expected[7:], rel=1e-12)
    assert Plan.load(tmp_path / "000003-step-7" / "plan.json").mesh == {"pp": 2, "dp": 1}
    manifest = json.loads((tmp_path / "000003-step-7" / "manifest.json").read_text())
    assert manifest["aliases"] == {"head.weight": "embed.weight"}
    assert {"model/embed.weight", "optimizer/exp_avg/embed.weight"} <= set(manifest["tensors"])
    files = {piece["file"] for entry in manifest["tensors"].values() for piece in entry["pieces"]}
    assert files == {"rank-00000.bin", "rank-00001.bin"}, "each stage writes its own"


def read_by_stage(folder: Path) -> tuple[int, int, dict[str, Tensor]]:
    """Load weights of every kind into a pipeline: elements read, elements that this stage holds, and the whole state."""
    read: list[int] = []
    parallel = place(Model(), 4, STAGES)
    for path in (folder / "weights.pt", folder / "weights.safetensors"):
        source = open_source(path)
        original = source.slice

        def spy(name: str, piece: Any, box: Any, original: Any = original) -> Tensor:
            found: Tensor = original(name, piece, box)
            read.append(found.numel())
            return found

        source.slice = spy  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "open_source", lambda path, source=source: source)
            assert parallel.load(path) == 0
    held = sum(local(tensor).numel() for tensor in {id(t): t for t in parallel.state_dict(keep_vars=True).values()}.values() if not tensor.is_meta)
    with pytest.raises(CheckpointError, match="leave the optimizer out"):
        parallel.load(folder / "weights.pt", adamw(parallel))
    return sum(read), held, parallel.full_state_dict()


def test_weights_of_others_go_into_stages(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    state = model.state_dict()
    torch.save(state, tmp_path / "weights.pt")
    save_file({name: value.clone() for name, value in state.items() if name != "head.weight"}, tmp_path / "weights.safetensors")
    results = ranks.run(4, read_by_stage, tmp_path)
    for read, held, whole in results:
        assert read == 2 * held
        assert list(whole) == list(state) and all(torch.equal(whole[name], value) for name, value in state.items())
    assert any(held < sum(value.numel() for value in state.values()) / 2 for _, held, _ in results)


def test_dropout_masks_go_on_and_the_plain_run_saves_too(tmp_path: Path) -> None:
    undisturbed = ranks.run(2, train_and_save, 2, "none", tmp_path / "two", range(2), range(2, 4), 0.5)
    assert ranks.run(2, load_and_train, 2, "zero2", tmp_path / "two", range(2, 4), False, 0.5) == [pytest.approx(losses) for losses in undisturbed]
    after = train_and_save(1, "none", tmp_path / "one", range(2), range(2, 4), 0.5)
    assert load_and_train(1, "none", tmp_path / "one", range(2, 4), False, 0.5) == after
    model = Model(0.5)
    optimizer = adamw(model)
    load_checkpoint(tmp_path / "one", model, optimizer)
    assert steps(model, optimizer, range(2, 4)) == pytest.approx(after, rel=1e-12)


def test_a_parallel_model_is_not_copied(tmp_path: Path) -> None:
    parallel = place(Model(), 1, "none")
    for attempt in (lambda: copy.deepcopy(parallel), lambda: copy.copy(parallel), lambda: torch.save(parallel, tmp_path / "x.pt")):
        with pytest.raises(PartitionerError, match=r"neither copied nor pickled; .*full_state_dict\(\), .*parallel\.save\(folder, optimizer\)"):
            attempt()


# ------------------------------------------------------------------------------------------------------------ optimizers and models


def trained(kind: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    steps(model, optimizer, range(2))
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"lr": torch.tensor(0.01), "foreach": False}),
        ("Rprop", {}),
        ("NAdam", {}),
        ("Adagrad", {}),
    ],
)
def test_every_kind_of_optimizer_goes_on(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model, optimizer = trained(kind, options)
    save_plain(tmp_path, model, optimizer, 2)
    other = Model()
    fresh = getattr(torch.optim, kind)(other.parameters(), **{**options, "lr": options["lr"] * 0 + 7 if "lr" in options else 7.0})
    assert load_checkpoint(tmp_path, other, fresh) == 2
    mine, theirs = fresh.state_dict(), optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and list(mine["state"]) == list(theirs["state"])
    assert type(fresh.param_groups[0]["lr"]) is type(optimizer.param_groups[0]["lr"])
    assert steps(other, fresh, range(2, 5)) == steps(model, optimizer, range(2, 5))


def test_another_model_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    save_plain(tmp_path, Model())
    wider, deeper, flat = Model(width=6), Model(), nn.Sequential(nn.Linear(2, 2))
    deeper.more = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"step-1 is of another model: 'one' has shape \[1, 5\] in it and \[1, 6\] in the model"):
        load_checkpoint(tmp_path, wider)
    assert all(torch.equal(value, before[name]) for name, value in wider.state_dict().items())
    with pytest.raises(CheckpointError, match=r"2 names of the model are missing in it \('more\.weight', 'more\.bias'\), 0 names in it are not"):
        load_checkpoint(tmp_path, deeper)
    with pytest.raises(CheckpointError, match=r"2 names of the model .* 14 names in it are not the model's \('back\.bias', .*, …\)"):
        load_checkpoint(tmp_path, flat)
    with pytest.raises(CheckpointError, match=r"on the meta device .* model\.to_empty"), torch.device("meta"):
        load_checkpoint(tmp_path, Model())


def test_an_optimizer_goes_where_it_was_saved_and_nowhere_else(tmp_path: Path) -> None:
    model, optimizer = trained("AdamW", {})
    save_plain(tmp_path / "with", model, optimizer)
    save_plain(tmp_path / "without", model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for path in ("without", "weights.pt"):
        with pytest.raises(CheckpointError, match="leave the optimizer out"):
            load_checkpoint(tmp_path / path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"holds the state of torch\.optim\.adamw\.AdamW, without which .* or call \.eval\(\) first"):
        load_checkpoint(tmp_path / "with", model)
    with pytest.raises(CheckpointError, match=r"holds the state of torch\.optim\.adamw\.AdamW, but the optimizer is torch\.optim\.sgd\.SGD"):
        load_checkpoint(tmp_path / "with", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match=r"an optimizer of 1 parameter groups, but this one has 2"):
        load_checkpoint(tmp_path / "with", model, adamw(model))
    some = [parameter for name, parameter in model.named_parameters() if name != "idle"]
    with pytest.raises(CheckpointError, match=r"group 0 is of other parameters: 0 names .*, 1 names in it are not in this one \('idle'\)"):
        load_checkpoint(tmp_path / "with", model, torch.optim.AdamW(some))
    with pytest.raises(CheckpointError, match=r"AdamW holds a parameter of shape \[\] that is not the model's"):
        load_checkpoint(tmp_path / "with", model, torch.optim.AdamW(Model().parameters()))
    generator = torch.get_rng_state()
    other = Model().eval()
    assert load_checkpoint(tmp_path / "with", other) == 1
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(other.get_parameter("hidden.weight"), model.get_parameter("hidden.weight"))


class Extra(nn.Linear):
    """A module that keeps something besides tensors."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: Any = {"words": ["a", 1.5, None], "count": 3}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("seen", [{"words": ["a", 1.5, float("inf")], "count": 3}, torch.arange(3)])
def test_extra_state_comes_back(tmp_path: Path, seen: Any) -> None:
    model, other = Extra(), Extra()
    model.seen, other.seen = seen, torch.zeros(3, dtype=torch.int64) if isinstance(seen, Tensor) else None
    save_plain(tmp_path, model)
    load_checkpoint(tmp_path, other)
    assert torch.equal(other.seen, seen) if isinstance(seen, Tensor) else other.seen == seen
    model.seen = {"object": object()}
    with pytest.raises(CheckpointError, match=r"the entry '_extra_state' of state_dict\(\) is a dict, which a checkpoint cannot hold"):
        save_plain(tmp_path, model)


# ------------------------------------------------------------------------------------------------------------------ files of others


def read_slices(folder: Path, shard: Any) -> tuple[int, int, list[Tensor]]:
    """Load every file of `folder` into cut parameters: elements read, elements held, and the parameters whole."""
    rank, group = dist.get_rank(), dist.group.WORLD
    read: list[int] = []
    held = 0
    whole: list[Tensor] = []
    for path in (folder / "weights.pt", folder / "one.safetensors", folder / "several"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 3, bias=False))
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        names = tuple(name for name, _ in model.named_parameters())
        store = UnitStore(model, (Unit(0, shard, names),), ranks=2, rank=rank, group=group)

        source = open_source(path)
        original = source.slice

        def spy(name: str, piece: Any, box: Any, original: Any = original) -> Tensor:
            found: Tensor = original(name, piece, box)
            read.append(found.numel())
            return found

        source.slice = spy  # type: ignore[method-assign]
        held += sum(local(parameter).numel() for parameter in model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "open_source", lambda path, source=source: source)
            checkpoint.load(path, model, None, Peers(rank, 2, group), CPU)
        store.mark_stale()
        whole += store.full_state().values()
    return sum(read), held, whole


@pytest.mark.parametrize("shard", ["zero3", "none"])
def test_other_files_are_read_slice_by_slice(tmp_path: Path, shard: str) -> None:
    from safetensors.torch import save_file

    state = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 3, bias=False)).state_dict()
    torch.save(state, tmp_path / "weights.pt")
    save_file(state, tmp_path / "one.safetensors")
    (tmp_path / "several").mkdir()
    parts = {"0.weight": "a.safetensors", "0.bias": "b.safetensors", "1.weight": "b.safetensors"}
    for file in set(parts.values()):
        save_file({name: value for name, value in state.items() if parts[name] == file}, tmp_path / "several" / file)
    (tmp_path / "several" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    results = ranks.run(2, read_slices, tmp_path, shard)
    total = 3 * sum(value.numel() for value in state.values())
    for read, held, whole in results:
        assert read == held
        assert all(torch.equal(found, value) for found, value in zip(whole, [*state.values()] * 3, strict=True))
    assert sum(held for _, held, _ in results) == (total if shard == "zero3" else 2 * total)


def test_the_example_resumes_with_the_same_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.run(2, resume.on_this_rank, tmp_path, False, group=False) == [0, 0]
    assert ranks.run(3, resume.on_this_rank, tmp_path, True, group=False) == [0, 0, 0]
    assert resume.in_one_process(tmp_path) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("one process  steps 4 … 7: ") and second.startswith("largest difference from the undisturbed run: ")
