"""The solver against exhaustive search, and its promises: order, depth, ties, limits, messages."""

import time
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner import solver
from partitioner.errors import InfeasibleError
from partitioner.solver import Option, Problem, Run, breakdown, least_memory, seconds_of, solve
from partitioner.solver_problem import undominated

number = st.integers(0, 6)
options = st.builds(
    Option,
    key=st.just("o"),
    compute_seconds=st.integers(1, 8).map(float),
    communication_seconds=number.map(float),
    persistent_bytes=number,
    saved_bytes=number,
    forward_bytes=number,
    backward_bytes=number,
)
runs = st.builds(Run, st.integers(0, 3), st.lists(options, min_size=1, max_size=3).map(tuple))
capacities = st.none() | st.integers(0, 60)
problems = st.builds(
    Problem, st.lists(runs, min_size=1, max_size=3).map(tuple), base_bytes=number, capacity_bytes=capacities, overlap=st.booleans()
).filter(lambda p: sum(run.count for run in p.runs) <= 6)


@st.composite
def in_turn(draw: st.DrawFn) -> Problem:
    """Kinds of blocks that come again along the chain."""
    kinds = draw(st.lists(st.lists(options, min_size=1, max_size=3).map(tuple), min_size=2, max_size=2))
    chain = draw(st.lists(st.integers(0, 1), min_size=3, max_size=6))
    return Problem(tuple(Run(1, kinds[k]) for k in chain), draw(number), draw(capacities), draw(st.booleans()))


def everything(problem: Problem) -> list[tuple[float, int]]:
    """(seconds, peak bytes) of every choice in every order, by the definition and by nothing else."""
    found = []
    blocks = [run for run in problem.runs for _ in range(run.count)]
    for taken in product(*(run.options for run in blocks)):
        persistent = problem.base_bytes + sum(o.persistent_bytes for o in taken)
        peak, saved = persistent, 0
        for o in taken:
            peak = max(peak, persistent + saved + o.forward_bytes)
            saved += o.saved_bytes
            peak = max(peak, persistent + saved + o.backward_bytes)
        compute, communication = sum(o.compute_seconds for o in taken), sum(o.communication_seconds for o in taken)
        found.append((max(compute, communication) if problem.overlap else compute + communication, peak))
    return found


@settings(max_examples=300, deadline=None)
@given(problems)
def test_equals_exhaustive_search(problem: Problem) -> None:
    every = everything(problem)
    fitting = [(s, b) for s, b in every if problem.capacity_bytes is None or b <= problem.capacity_bytes]
    assert least_memory(problem).peak_bytes == min(b for _, b in every)
    if not fitting:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    solution = solve(problem)
    assert (solution.seconds, solution.peak_bytes) == min(fitting)
    assert seconds_of(problem, solution.choices) == solution.seconds
    assert breakdown(problem, solution.choices).peak_bytes == solution.peak_bytes
    assert [len(c) for c in solution.choices] == [run.count for run in problem.runs]
    assert solution.gap <= 1e-9 and solution.bound_seconds <= solution.seconds


@pytest.mark.parametrize("few", [0, 12])
def test_kinds_in_turn_equal_exhaustive_search(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "FEW", few)  # 0: first as if they could change places, then apart

    @settings(max_examples=100, deadline=None)
    @given(in_turn())
    def check(problem: Problem) -> None:
        every = everything(problem)
        fitting = [(s, b) for s, b in every if problem.capacity_bytes is None or b <= problem.capacity_bytes]
        if not fitting:
            with pytest.raises(InfeasibleError):
                solve(problem)
            return
        solution = solve(problem)
        assert (solution.seconds, solution.peak_bytes) in fitting
        assert solution.seconds == min(fitting)[0] and solution.gap <= 1e-5
        if few:
            assert solution.peak_bytes == min(fitting)[1]

    check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_chain_of_kinds_in_turn(overlap: bool) -> None:
    random = Random(3)
    kinds = [like_a_block(random, 24, scale).options for scale in (0.4, 0.7)]
    problem = Problem(tuple(Run(1, kind) for _ in range(40) for kind in kinds), 10**9, None, overlap)
    least, most = least_memory(problem).peak_bytes, solve(problem).peak_bytes
    start = time.process_time()
    solution = solve(Problem(problem.runs, problem.base_bytes, (least + most) // 2, overlap))
    assert time.process_time() - start < 5
    assert solution.gap < 1e-4


@settings(max_examples=200, deadline=None)
@given(st.lists(options, min_size=1, max_size=5))
def test_descending_tail_is_the_best_order(taken: list[Option]) -> None:
    def peak(order: tuple[Option, ...]) -> int:
        return breakdown(Problem((Run(len(order), order),)), (tuple(range(len(order))),)).peak_bytes

    best = min(peak(order) for order in permutations(taken))
    assert peak(tuple(sorted(taken, key=lambda o: -o.tail_bytes))) == best


@settings(max_examples=60, deadline=None)
@given(problems, st.integers(0, 20))
def test_more_memory_is_never_slower(problem: Problem, more: int) -> None:
    least = least_memory(problem)
    small = Problem(problem.runs, problem.base_bytes, least.peak_bytes, problem.overlap)
    large = Problem(problem.runs, problem.base_bytes, least.peak_bytes + more, problem.overlap)
    assert solve(large).seconds <= solve(small).seconds
    assert solve(small).peak_bytes == least.peak_bytes and solve(small).seconds == least.seconds


@settings(max_examples=200, deadline=None)
@given(runs, st.booleans())
def test_dominated_options_are_removed(run: Run, overlap: bool) -> None:
    kept = undominated(run, overlap)
    assert kept
    for o in run.options:
        better = [run.options[k] for k in kept]
        better = [k for k in better if k.saved_bytes <= o.saved_bytes and k.peak_bytes <= o.peak_bytes and k.persistent_bytes <= o.persistent_bytes]
        assert any(seconds_of(Problem((Run(1, (k,)),), overlap=overlap), ((0,),)) <= o.compute_seconds + o.communication_seconds for k in better)
    assert undominated(Run(run.count, tuple(run.options[k] for k in kept)), overlap) == sorted(range(len(kept)))


def like_a_block(random: Random, count: int, scale: float) -> Run:
    """`count` options of a transformer block: four ways to shard its state, each with a frontier of saved bytes against recomputation."""
    options = []
    for shard, (share, seconds) in enumerate(((1.0, 0.0), (0.5, 0.004), (0.4, 0.006), (0.1, 0.012))):
        for level in range(count // 4):
            keep = (level + random.random()) / (count // 4)
            options.append(
                Option(
                    f"zero{shard} level{level}",
                    compute_seconds=scale * (0.05 + 0.03 * (1 - keep) ** 2),
                    communication_seconds=scale * seconds * (1 + 0.01 * random.random()),
                    persistent_bytes=int(scale * 6e9 * share) + random.randrange(1000),
                    saved_bytes=int(scale * 1e9 * keep) + random.randrange(1000),
                    forward_bytes=int(scale * (3e8 + 4e8 * (shard == 3))) + random.randrange(1000),
                    backward_bytes=int(scale * (9e8 + 8e8 * (1 - keep) + 4e8 * (shard == 3))) + random.randrange(1000),
                )
            )
    return Run(126, tuple(options))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("room", [0.05, 0.3, 0.8])
def test_126_blocks_of_40_options(overlap: bool, room: float) -> None:
    random = Random(7)
    ends = tuple(Run(1, like_a_block(random, 40, scale).options) for scale in (0.2, 0.6))
    problem = Problem((ends[0], like_a_block(random, 40, 1.0), ends[1]), base_bytes=10**9)
    least, most = least_memory(problem).peak_bytes, solve(Problem(problem.runs, problem.base_bytes, None, overlap)).peak_bytes
    limited = Problem(problem.runs, problem.base_bytes, int(least + room * (most - least)), overlap)
    start = time.process_time()
    solution = solve(limited)
    assert time.process_time() - start < 2
    assert solution.peak_bytes <= limited.capacity_bytes  # type: ignore[operator]
    assert solution.gap < 1e-6
    assert solve(limited) == solution  # deterministic


def test_infeasible_says_which_limit_by_how_much_and_three_ways_out() -> None:
    run = Run(4, (Option("a", 1.0, persistent_bytes=2_000_000, saved_bytes=300_000, backward_bytes=100_000),))
    with pytest.raises(InfeasibleError) as error:
        solve(Problem((run,), base_bytes=500_000, capacity_bytes=9_000_000))
    text = str(error.value)
    assert "9.00 MB" in text and "9.80 MB" in text and "800.00 kB too much" in text and "backward of block 3" in text
    assert "8.00 MB of parameters" in text and "1.20 MB saved" in text
    assert "(1) spread parameters" in text and "(2) take a smaller batch" in text and "(3) allow 9.80 MB" in text


def test_ties_go_to_fewer_bytes() -> None:
    heavy, light = Option("heavy", 1.0, saved_bytes=50, persistent_bytes=1), Option("light", 1.0, saved_bytes=10, persistent_bytes=2)
    solution = solve(Problem((Run(5, (heavy, light)),)))
    assert solution.choices == ((1, 1, 1, 1, 1),)


@pytest.mark.parametrize("wrong", [Option("a", float("nan")), Option("a", -1.0), Option("a", 1.0, saved_bytes=-1), Option("a", float("inf"))])
def test_refuses_numbers_without_meaning(wrong: Option) -> None:
    with pytest.raises(ValueError, match="'a' of run 0"):
        solve(Problem((Run(1, (wrong,)),)))


def test_a_block_without_options_is_refused() -> None:
    with pytest.raises(ValueError, match="no option to choose from"):
        solve(Problem((Run(2, ()),)))
