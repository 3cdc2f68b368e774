"""Placing, gathering, reducing: equal to one process, and to the byte what UnitBytes says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partitioner.errors import InputError, LaunchError, ProgramError, RankError
from partitioner.runtime import launch
from partitioner.runtime.memory import Tracker, storage_bytes
from partitioner.runtime.parameters import UnitStore, shapes_of
from partitioner.runtime.program import Unit
from partitioner.runtime.shards import ALIGN, chunk_rows, lay_out, local_rows, local_shape
from partitioner.runtime.unit_bytes import UnitBytes
from tests import ranks as pool

LEVELS = ("none", "zero1", "zero2", "zero3")


class Model(nn.Module):
    """Everything that placing must cope with: large, small, uneven, fewer rows than ranks, 0-dim, empty, tied, frozen, unused, mixed dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(501, 48)
        self.first = nn.Linear(48, 128)
        self.second = nn.Linear(128, 150)
        self.norm = nn.LayerNorm(5)
        self.single = nn.Parameter(torch.randn(1, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(203, 101), requires_grad=False)
        self.small_frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
        self.halves = nn.ParameterList([nn.Parameter(torch.randn(3, dtype=torch.bfloat16)), nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))])
        self.unused = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(48, 501, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.scale.tag = "kept"  # type: ignore[attr-defined]
        self.wide.tag = "kept"  # type: ignore[attr-defined]


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def units(shard: Any) -> tuple[Unit, ...]:
    """Two blocks; `never` gets no gradient, `unused` is in no unit."""
    one = ("embedding.weight", "first.weight", "first.bias", "scale", "offset", "empty", "frozen", "never")
    two = ("second.weight", "second.bias", "norm.weight", "norm.bias", "single", "small_frozen", "wide", "halves.0", "halves.1")
    return Unit(0, shard, one), Unit(7, shard, two)


def gradient(name: str, like: Tensor, rank: int, mb: int) -> Tensor:
    """Small integers, so that every order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(hash((len(name), like.numel(), rank, mb)) % 2**31)
    return torch.randint(-3, 4, like.shape, generator=generator).to(like.dtype)


def trained(model: nn.Module, listed: tuple[Unit, ...]) -> list[tuple[Unit, list[str]]]:
    known = dict(model.named_parameters())
    return [(unit, [name for name in unit.parameters if known[name].requires_grad and name != "never"]) for unit in reversed(listed)]


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def store_of(model: nn.Module, shard: str) -> tuple[UnitStore, tuple[Unit, ...], int, int]:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    listed = units(shard)
    return UnitStore(model, listed, ranks=ranks, rank=rank, group=dist.group.WORLD if ranks > 1 else None), listed, ranks, rank


# Arithmetic


@given(st.integers(1, 50), st.integers(1, 20))
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    pieces = torch.arange(rows).chunk(ranks)
    expected = [len(pieces[rank]) if rank < len(pieces) else 0 for rank in range(ranks)]
    assert [local_rows(rows, ranks, rank) for rank in range(ranks)] == expected
    assert chunk_rows(rows, ranks) == expected[0]


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tables = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(shapes, st.sampled_from([torch.float32, torch.float64]), st.booleans()), min_size=1)


@settings(deadline=None)
@given(tables, st.integers(1, 9), st.sampled_from(LEVELS))
def test_a_layout_holds_every_parameter_once_and_none_overlap(table: Any, ranks: int, shard: Any) -> None:
    layout = lay_out(Unit(0, shard, tuple(table)), table, ranks)
    assert set(layout.pieces) == set(table)
    for together in (layout.gathered, layout.scattered, layout.summed):
        names = [piece.name for piece in together.alone]
        for shared in together.shared:
            names += [piece.name for piece in shared.pieces]
            assert len(shared.pieces) > 1 and {piece.dtype for piece in shared.pieces} == {shared.dtype}
            end = whole_end = 0
            for piece in shared.pieces:
                assert piece.offset >= end and piece.offset % ALIGN == 0 and piece.whole_offset >= whole_end
                end, whole_end = piece.offset + piece.size, piece.whole_offset + piece.size * ranks
            assert end <= shared.segment
        assert len(names) == len(set(names))
    trainable = {name for name, (_, _, wants) in table.items() if wants}
    reduced = [piece.name for together in (layout.scattered, layout.summed) for piece in together.alone]
    reduced += [piece.name for together in (layout.scattered, layout.summed) for shared in together.shared for piece in shared.pieces]
    assert sorted(reduced) == sorted(trainable)
    for shape, _, _ in table.values():
        rows = sum(local_shape(shape, ranks, rank)[0] for rank in range(ranks)) if shape and 0 not in shape and ranks > 1 else None
        assert rows is None or rows == shape[0]


@settings(deadline=None)
@given(tables, st.integers(1, 9), st.sampled_from(LEVELS), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_events_of_a_step_balance(table: Any, ranks: int, shard: Any, arrivals: list[int]) -> None:
    """Whatever is made and is no result is dropped; what is dropped was there; what stays is gradient_bytes."""
    unit = Unit(0, shard, tuple(table))
    ghost = UnitBytes.of((unit,), table, ranks, 0)[0]
    held: dict[str, int] = {}

    def play(op: str) -> None:
        for verb, key, count in ghost.events(op):
            if verb == "make":
                assert key not in held and count >= 0
                held[key] = count
            else:
                assert held.pop(key) == count

    play("GATHER")
    for times in arrivals if shard in ("zero2", "zero3") else arrivals[:1]:
        for turn in range(times):
            for name, (_, _, wants) in table.items():
                if wants:
                    play(f"ACCUMULATE:{name}:{'next' if turn else 'first'}")
        play("REDUCE")
    play("FREE")
    play("FINISH")
    assert sum(held.values()) == ghost.gradient_bytes()


def test_a_unit_that_names_a_strange_parameter_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"'layer.weight', which the model does not have"):
        UnitStore(build(), (Unit(0, "zero1", ("layer.weight",)),), ranks=1, rank=0, group=None)
    with pytest.raises(ProgramError, match=r"already in a unit as 'embedding.weight'"):
        UnitStore(build(), (Unit(0, "none", ("embedding.weight", "head.weight")),), ranks=1, rank=0, group=None)


# On ranks


def _step(shard: str, micro_batches: int) -> dict[str, Any]:
    """Place, load, read, train two micro-batches' gradients, under the Tracker, next to the ghost. Returns what ranks can compare."""
    model = build()
    table = shapes_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store, listed, ranks, rank = store_of(model, shard)
    ghosts = UnitBytes.of(listed, table, ranks, rank)
    assert model.head.weight is model.embedding.weight
    assert getattr(model.wide, "tag", "") == getattr(model.scale, "tag", "") == "kept"
    for name, parameter in model.named_parameters():
        placed = shard == "zero3" or (shard != "none" and parameter.requires_grad)
        placed = placed and name in [n for unit in listed for n in unit.parameters]
        cut = placed and ranks > 1 and parameter.dim() > 0 and parameter.numel() > 0
        assert isinstance(parameter, DTensor) == cut and isinstance(parameter, nn.Parameter), name
        assert parameter.requires_grad == table[name][2] and tuple(parameter.shape) == table[name][0]
        if cut:
            assert torch.equal(whole(parameter), before[name]), name
            assert local(parameter).shape == local_shape(table[name][0], ranks, rank)
    owned = store.held()
    unused = storage_bytes(parameter.detach() for name, parameter in model.named_parameters() if name.startswith("unused"))
    assert storage_bytes(owned) == unused + sum(ghost.persistent() for ghost in ghosts.values())

    full = store.full_state()
    assert list(full) == list(before) and full["head.weight"] is full["embedding.weight"]
    assert all(torch.equal(full[name], before[name]) for name in before)
    other = {name: value + 1 for name, value in before.items()}
    other["head.weight"] = other["embedding.weight"]
    store.load_full_state(other)
    assert all(torch.equal(value, other[name]) for name, value in store.full_state().items())
    store.mark_stale()

    del full
    tracker = Tracker().track(owned)
    held: dict[str, int] = {}
    ghost_now = tracker.now_bytes
    start = tracker.now_bytes
    peak = 0

    def ghost(unit: Unit, op: str) -> None:
        nonlocal ghost_now, peak
        for verb, key, count in ghosts[unit.number].events(op):
            if verb == "make":
                held[key] = count
                ghost_now += count
            else:
                ghost_now -= held.pop(key)
            peak = max(peak, ghost_now)

    def compare(text: str) -> None:
        assert (tracker.now_bytes, tracker.peak_bytes) == (ghost_now, max(peak, ghost_now)), text
        tracker.reset_peak()
        peak_reset()

    def peak_reset() -> None:
        nonlocal peak
        peak = ghost_now

    with torch.no_grad(), tracker:
        for unit in listed:
            ghost(unit, "REFRESH")
            store.refresh(unit)
            ghost(unit, "GATHER")
            store.gather(unit)
            store.gather(unit)
            compare(f"gather {unit.number}")
            for name in unit.parameters:
                assert torch.equal(store.whole(name), other[name]), name
            compare(f"whole {unit.number}")
            ghost(unit, "FREE")
            store.free(unit)
            compare(f"free {unit.number}")
        for mb in range(micro_batches):
            last = mb == micro_batches - 1
            for unit, names in trained(model, listed):
                for name in names:
                    first = mb == 0 or shard in ("zero2", "zero3")
                    given = gradient(name, before[name], rank, mb)
                    tracker.track(given)
                    tracker.reset_peak()
                    if first:
                        ghost(unit, f"ACCUMULATE:{name}:first")
                        store.accumulate(name, given)
                        del given
                    else:
                        store.accumulate(name, given)
                        del given
                        ghost(unit, f"ACCUMULATE:{name}:next")
                        tracker.reset_peak()
                        peak_reset()
                    compare(f"accumulate {name} {mb}")
                if last or shard in ("zero2", "zero3"):
                    ghost(unit, "REDUCE:last" if last else "REDUCE")
                store.reduce(unit, last)
                compare(f"reduce {unit.number} {mb}")
        for unit in listed:
            ghost(unit, "FINISH")
        store.finish()
        compare("finish")
    never = UnitBytes(Unit(0, listed[0].shard, ("never",)), table, ranks, rank).gradient_bytes()
    assert ghost_now - start == tracker.now_bytes - start
    assert sum(g.gradient_bytes() for g in ghosts.values()) - never <= ghost_now - start + 4 * ALIGN

    for unit, names in trained(model, listed):
        for name in unit.parameters:
            found = dict(model.named_parameters())[name].grad
            if name not in names:
                assert found is None, name
                continue
            wanted = torch.stack([gradient(name, before[name], r, mb) for r in range(ranks) for mb in range(micro_batches)]).sum(0)
            assert torch.equal(whole(found), wanted), name
    # a gradient that the user has not zeroed is added to
    store.accumulate("single", gradient("single", before["single"], rank, 9))
    store.reduce(listed[1], True)
    store.finish()
    rounds = [*range(micro_batches), 9]
    wanted = torch.stack([gradient("single", before["single"], r, mb) for r in range(ranks) for mb in rounds]).sum(0)
    found = model.single.grad
    assert torch.equal(whole(found), wanted)
    norms = {}
    for norm_type in (2.0, 1.0, float("inf")):
        norms[norm_type] = store.clip_grad_norm_(1e9, norm_type).double()
    norm = store.clip_grad_norm_(0.5)
    after = store.clip_grad_norm_(1e9)
    assert after.item() == pytest.approx(0.5, rel=1e-2)
    return {"norms": norms, "norm": norm, "reads": _refused(store, listed[0], shard, ranks)}


def _refused(store: UnitStore, unit: Unit, shard: str, ranks: int) -> str:
    """What reading at the wrong time says."""
    store.mark_stale()
    try:
        store.whole("first.weight")
    except ProgramError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shard", LEVELS)
def test_a_step_equals_one_process_and_its_bytes_are_foretold(shard: str, ranks: int) -> None:
    micro_batches = 1 if shard == "zero1" and ranks == 2 else 2
    results = [_step(shard, micro_batches)] if ranks == 1 else pool.run(ranks, _step, shard, micro_batches)
    model = build()
    wholes = []
    for _, names in trained(model, units(shard)):
        for name in names:
            like = dict(model.named_parameters())[name]
            rounds = [*range(micro_batches), *([9] if name == "single" else [])]
            summed = [gradient(name, like, r, mb) for r in range(ranks) for mb in rounds]
            wholes.append(torch.stack(summed).sum(0).double().flatten())
    everything = torch.cat(wholes)
    for result in results:
        for norm_type, norm in result["norms"].items():
            torch.testing.assert_close(norm, torch.linalg.vector_norm(everything, norm_type), rtol=1e-6, atol=0)
        assert torch.equal(result["norm"], results[0]["norm"])
        expected = "" if ranks == 1 or shard == "none" else "GATHER unit 0" if shard == "zero3" else "REFRESH unit 0"
        assert (expected in result["reads"]) and bool(expected) == bool(result["reads"])


def _load_refuses() -> list[str]:
    store, *_ = store_of(build(), "zero3")
    texts = []
    for change in ({"strange": torch.zeros(1)}, {"first.bias": torch.zeros(4)}):
        try:
            store.load_full_state({**store.full_state(), **change})
        except InputError as error:
            texts.append(str(error))
    return texts


def test_a_state_of_another_model_is_refused() -> None:
    unknown, shape = pool.run(2, _load_refuses)[1]
    assert "'strange'" in unknown and "'first.bias' has shape [4]" in shape


def _meta() -> list[Any]:
    with torch.device("meta"):
        model = Model()
    model.count = torch.tensor(0)
    store, *_ = store_of(model, "zero3")
    store.load_full_state(build().state_dict())
    return [torch.equal(value, build().state_dict()[name]) for name, value in store.full_state().items()]


def test_a_model_on_meta_is_placed_and_loaded() -> None:
    assert all(pool.run(2, _meta)[0])


# Launch


def _join(expected: int) -> tuple[int, int, str, str | None]:
    found = launch.join(expected)
    told = launch.broadcast_object({"plan": [1, 2]} if found.rank == 0 else None, found)
    launch.agree({"the plan": str(told)}, found)
    try:
        launch.agree({"the programs": {"first": "odd" if found.rank == 1 else "even"}}, found)
    except RankError as error:
        return found.rank, found.ranks, str(found.device), str(error)
    return found.rank, found.ranks, str(found.device), None


def test_ranks_join_and_disagree_together() -> None:
    results = pool.run(3, _join, 3, group=False)
    assert [result[:3] for result in results] == [(rank, 3, "cpu") for rank in range(3)]
    assert all("rank 1: the programs first is odd, on rank 0 even" in result[3] for result in results)
    with pytest.raises(LaunchError, match=r"the plan is for 3 ranks, and 2 were started(.|\n)*torchrun --nproc-per-node 3"):
        pool.run(2, _join, 3, group=False)


def test_one_rank_needs_no_group_and_several_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = launch.join(1)
    assert (alone.rank, alone.ranks, alone.group) == (0, 1, None) and not dist.is_initialized()
    assert launch.broadcast_object(5, alone) == 5
    launch.agree({"anything": "digest"}, alone)
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs", "3"])
    monkeypatch.setattr("sys.modules", {"__main__": None})
    with pytest.raises(LaunchError, match=r"torchrun --nproc-per-node 8 train.py --epochs 3"):
        launch.join(8)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(LaunchError, match=r"WORLD_SIZE is 'many'"):
        launch.join(1)
