"""Schedules: every turn once, nothing out of order, the orders of the textbooks, and the bubbles they promise."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.schedules import NAMES, Name, Order, Turn, chunks_of, in_flight, makespan, needs, schedule, stage_of

names = st.sampled_from(NAMES)
stage_counts = st.integers(1, 8)
counts = st.integers(1, 20)


def halves(turn: Turn) -> float:
    """F, I and W take as long, B takes both halves."""
    return 2.0 if turn.op == "B" else 1.0


def bubble(name: Name, stages: int, micro_batches: int, per_stage: int = 2) -> float:
    """Idle time of a rank, in forwards of a whole stage."""
    chunks_each = chunks_of(name, stages, per_stage) // stages
    return makespan(name, schedule(name, stages, micro_batches, per_stage), halves) / chunks_each - 3 * micro_batches


def play(name: Name, order: Order, chunks: int) -> None:
    """Every rank runs its list, a receive blocks until the neighbour has sent; nothing of the module under test decides what must come first."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, turns in enumerate(order):
            while at[rank] < len(turns):
                op, chunk, mb = turns[at[rank]]
                assert rank == stage_of(name, chunk, len(order))
                if op == "F":
                    received = chunk == 0 or ("F", chunk - 1, mb) in done
                elif op == "W":
                    assert ("I", chunk, mb) in done  # of this rank itself: not to be waited for
                    received = True
                else:
                    assert ("F", chunk, mb) in done
                    received = chunk == chunks - 1 or (op, chunk + 1, mb) in done
                if not received:
                    break
                done.add((op, chunk, mb))
                at[rank] += 1
                moved = True
    assert at == [len(turns) for turns in order], f"deadlock at {[turns[i] for i, turns in zip(at, order, strict=True) if i < len(turns)]}"


@settings(max_examples=250, deadline=None)
@given(names, stage_counts, counts, st.integers(1, 3), st.none() | st.randoms(use_true_random=False))
def test_every_turn_once_and_no_deadlock(name: Name, stages: int, micro_batches: int, per_stage: int, random: object) -> None:
    known: dict[Turn, float] = {}
    seconds = None if random is None else lambda turn: known.setdefault(turn, random.choice([0.0, 0.3, 1.0, 2.5]))  # type: ignore[attr-defined]
    order = schedule(name, stages, micro_batches, per_stage, seconds=seconds)
    chunks = chunks_of(name, stages, per_stage)
    play(name, order, chunks)
    ops = "FIW" if name.startswith("zb") else "FB"
    every = [(op, chunk, mb) for op in ops for chunk in range(chunks) for mb in range(micro_batches)]
    assert sorted(map(tuple, chain(*order))) == sorted(every)
    assert order == schedule(name, stages, micro_batches, per_stage, seconds=seconds)


@settings(deadline=None)
@given(names, stage_counts, st.integers(1, 3))
def test_chunks_are_dealt_evenly(name: Name, stages: int, per_stage: int) -> None:
    ranks = [stage_of(name, chunk, stages) for chunk in range(chunks_of(name, stages, per_stage))]
    assert {ranks.count(rank) for rank in range(stages)} == {len(ranks) // stages}
    assert ranks[:stages] == list(range(stages))
    if name == "zb-v":
        assert ranks[stages:] == list(reversed(range(stages)))


@settings(deadline=None)
@given(stage_counts, counts)
def test_gpipe_runs_all_forwards_first(stages: int, micro_batches: int) -> None:
    for rank, turns in enumerate(schedule("gpipe", stages, micro_batches)):
        assert turns == tuple(Turn(op, rank, mb) for op in ("F", "B") for mb in range(micro_batches))
    assert in_flight("gpipe", stages, micro_batches) == (micro_batches,) * stages


@settings(deadline=None)
@given(stage_counts, counts)
def test_1f1b_warms_up_then_takes_turns(stages: int, micro_batches: int) -> None:
    for rank, turns in enumerate(schedule("1f1b", stages, micro_batches)):
        warm_up = min(stages - rank - 1, micro_batches)
        steady = micro_batches - warm_up
        assert "".join(turn.op for turn in turns) == "F" * warm_up + "FB" * steady + "B" * warm_up
        for op in "FB":
            assert [turn.mb for turn in turns if turn.op == op] == list(range(micro_batches))
    assert in_flight("1f1b", stages, micro_batches) == tuple(min(stages - rank, micro_batches) for rank in range(stages))
    assert schedule("interleaved", stages, micro_batches, 1) == schedule("1f1b", stages, micro_batches)


def text(turns: tuple[Turn, ...]) -> str:
    return " ".join(f"{turn.op}{turn.chunk}.{turn.mb}" for turn in turns)


def test_interleaved_as_in_megatron() -> None:
    """Narayanan et al. 2021, figure 4 (below): 4 ranks, 8 micro-batches, 2 chunks; the warm-up of rank r is (V-1) S + 2 (S-r-1) = 10 - 2r."""
    order = schedule("interleaved", 4, 8)
    assert [text(turns).index("B") // 5 for turns in order] == [11, 9, 7, 5]
    assert text(order[0]).startswith("F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 B4.0 F0.7 B4.1 F4.4 B4.2 F4.5 B4.3 F4.6 B0.0 F4.7 B0.1")
    assert text(order[3]).startswith("F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 F3.4 B3.0")


def test_zero_bubble_as_in_its_papers() -> None:
    h1 = schedule("zb-h1", 2, 4)
    assert text(h1[0]) == "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 F0.3 I0.2 W0.2 I0.3 W0.3"
    assert text(h1[1]) == "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 F1.3 I1.3 W1.2 W1.3"
    assert text(schedule("zb-v", 2, 2)[0]) == "F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W0.0 I0.1 W0.1 W3.0 W3.1"


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(2, 4))
def test_bubbles_of_equal_turns(stages: int, rounds: int, per_stage: int) -> None:
    """Enough micro-batches, a multiple of the stages: the formulas of the papers."""
    micro_batches = stages * rounds
    found = {name: bubble(name, stages, micro_batches, per_stage) for name in NAMES}
    hop = stages - 1
    assert found == pytest.approx({"gpipe": 3 * hop, "1f1b": 3 * hop, "interleaved": 3 * hop / per_stage, "zb-h1": hop, "zb-v": hop / 2})


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), counts)
def test_zero_bubble_is_shorter_and_holds_no_more(stages: int, micro_batches: int) -> None:
    whole = bubble("1f1b", stages, micro_batches)
    assert bubble("zb-h1", stages, micro_batches) < whole
    assert bubble("zb-v", stages, micro_batches) < whole
    assert bubble("interleaved", stages, micro_batches) <= whole
    fullest = max(in_flight("1f1b", stages, micro_batches))
    assert max(in_flight("zb-h1", stages, micro_batches)) <= fullest
    assert max(in_flight("zb-v", stages, micro_batches)) <= fullest  # of half a stage each, and two of them


def test_zero_bubble_v_leaves_next_to_nothing() -> None:
    assert bubble("zb-v", 4, 64) / (3 * 64) < 0.01


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["zb-h1", "zb-v"]), st.integers(2, 5), st.integers(1, 10), st.randoms(use_true_random=False))
def test_known_durations_never_make_it_worse(name: Name, stages: int, micro_batches: int, random: object) -> None:
    known: dict[tuple[str, int], float] = {}

    def seconds(turn: Turn) -> float:
        return known.setdefault((turn.op, turn.chunk), random.uniform(0.5, 2.0))  # type: ignore[attr-defined]

    informed = schedule(name, stages, micro_batches, seconds=seconds)
    assert makespan(name, informed, seconds) <= makespan(name, schedule(name, stages, micro_batches), seconds)


def test_durations_can_make_it_better() -> None:
    def seconds(turn: Turn) -> float:
        return {"F": 1.0, "I": 1.1, "W": 0.8}[turn.op]

    assert makespan("zb-v", schedule("zb-v", 4, 4, seconds=seconds), seconds) < makespan("zb-v", schedule("zb-v", 4, 4), seconds)


def test_makespan_by_hand() -> None:
    order = schedule("1f1b", 2, 2)
    seconds = {"F": 1.0, "B": 2.0}
    # rank 0: F0 0-1, F1 1-2, B0 4-6, B1 7-9; rank 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7
    assert makespan("1f1b", order, lambda turn: seconds[turn.op]) == 9.0


def test_orders_that_deadlock_are_named() -> None:
    first, second = schedule("1f1b", 2, 2)
    swapped = (first[2], *first[:2], *first[3:])
    with pytest.raises(ValueError, match=r"deadlock, standing at B0\.0, F1\.0"):
        makespan("1f1b", (swapped, second), halves)


def test_needs() -> None:
    assert needs(Turn("F", 0, 3), 4) == []
    assert needs(Turn("F", 2, 3), 4) == [Turn("F", 1, 3)]
    assert needs(Turn("B", 3, 0), 4) == [Turn("F", 3, 0)]
    assert needs(Turn("I", 1, 0), 4) == [Turn("F", 1, 0), Turn("I", 2, 0)]
    assert needs(Turn("W", 1, 0), 4) == [Turn("I", 1, 0)]


@pytest.mark.parametrize(("stages", "micro_batches", "per_stage"), [(0, 1, 2), (1, 0, 2), (2, 2, 0)])
def test_counts_below_one_are_refused(stages: int, micro_batches: int, per_stage: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        schedule("interleaved", stages, micro_batches, per_stage)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no schedule 'dualpipe'; choose one of gpipe, 1f1b"):
        schedule("dualpipe", 2, 2)  # type: ignore[arg-type]
