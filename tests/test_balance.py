"""Balancing against exhaustive search, and its promises: bounds, memory, ties, speed, messages."""

import time
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import inf, prod
from random import Random

import pytest

from partitioner.balance import Balanced, Option, Problem, balance
from partitioner.errors import InfeasibleError


def plain(*seconds: float, stages: int) -> Problem:
    return Problem(tuple((Option(s),) for s in seconds), (1,) * stages)


def figures(problem: Problem, cuts: tuple[int, ...], options: tuple[int, ...]) -> tuple[list[float], list[int]]:
    """Seconds of every stage and peak of every device, by the definition and nothing else."""
    bounds = [0, *cuts, len(problem.blocks)]
    devices = problem.device or tuple(range(len(problem.in_flight)))
    seconds, held, transient = [], [0] * (max(devices) + 1), [0] * (max(devices) + 1)
    for k, in_flight in enumerate(problem.in_flight):
        first, after = bounds[k], bounds[k + 1]
        taken = [problem.blocks[i][options[i]] for i in range(first, after)]
        total = sum(o.seconds for o in taken)
        if problem.edge_seconds:
            total += (problem.edge_seconds[first] if first else 0) + (problem.edge_seconds[after] if k + 1 < len(problem.in_flight) else 0)
        seconds.append(total)
        saved = sum(o.saved_bytes for o in taken) + (problem.edge_bytes[first] if problem.edge_bytes and first else 0)
        held[devices[k]] += sum(o.persistent_bytes for o in taken) + in_flight * saved
        transient[devices[k]] = max(transient[devices[k]], *(o.transient_bytes for o in taken))
    return seconds, [h + t for h, t in zip(held, transient, strict=True)]


def exhaustive(problem: Problem) -> tuple[float, float] | None:
    """The best (bottleneck, sum of squares) of all cuts and options; None where nothing fits."""
    best = None
    for cuts in combinations(range(1, len(problem.blocks)), len(problem.in_flight) - 1):
        for options in product(*(range(len(o)) for o in problem.blocks)):
            seconds, peaks = figures(problem, cuts, options)
            if not problem.capacity_bytes or all(p <= c for p, c in zip(peaks, problem.capacity_bytes, strict=True)):
                found = max(seconds), sum(s * s for s in seconds)
                best = found if best is None else min(best, found)
    return best


def exhaustive_by_stage(problem: Problem) -> tuple[float, float] | None:
    """The same where every stage has its own device: all options of every stage's blocks, for all cuts."""
    blocks, stages = len(problem.blocks), len(problem.in_flight)

    @cache
    def least(k: int, first: int, after: int) -> float:
        edge_bytes = problem.edge_bytes[first] if problem.edge_bytes and first else 0
        fitting = [inf]
        for taken in product(*problem.blocks[first:after]):
            held = sum(o.persistent_bytes for o in taken) + problem.in_flight[k] * (sum(o.saved_bytes for o in taken) + edge_bytes)
            if not problem.capacity_bytes or held + max(o.transient_bytes for o in taken) <= problem.capacity_bytes[k]:
                fitting.append(sum(o.seconds for o in taken))
        return min(fitting) + sum(problem.edge_seconds[cut] for cut in (first, after) if problem.edge_seconds and 0 < cut < blocks)

    every = []
    for cuts in combinations(range(1, blocks), stages - 1):
        seconds = [least(k, a, b) for k, (a, b) in enumerate(zip((0, *cuts), (*cuts, blocks), strict=True))]
        every.append((max(seconds), sum(s * s for s in seconds)))
    return min(every) if min(every)[0] < inf else None


def small(random: Random, choices: int, shared: bool = False) -> Problem:
    """At most 8 blocks, 4 stages and 3 options (`choices` of them at most), some blocks equal; memory may bind, be missing or too little."""
    while True:
        stages = random.randint(1, 4)
        blocks = random.randint(stages, 8)
        kinds = [
            tuple(Option(random.randint(0, 9), *(random.randint(0, 6) for _ in range(3))) for _ in range(random.randint(1, 3)))
            for _ in range(random.randint(1, blocks))
        ]
        chain = tuple(random.choice(kinds) for _ in range(blocks))
        if prod(map(len, chain)) <= choices:
            break
    device = tuple(min(k, stages - 1 - k) for k in range(stages)) if shared else ()
    devices = max(device) + 1 if shared else stages
    per_block = 16 if shared else 8
    return Problem(
        chain,
        tuple(random.randint(1, 4) for _ in range(stages)),
        tuple(random.randint(per_block, 4 * per_block) * blocks // stages for _ in range(devices)) if random.random() < 0.8 else (),
        random.choice([(), tuple(float(random.randint(0, 4)) for _ in range(blocks))]),
        random.choice([(), tuple(random.randint(0, 4) for _ in range(blocks))]),
        device,
    )


def checked(problem: Problem, found: Balanced) -> Balanced:
    """Its figures are those of its decisions, and these are allowed."""
    seconds, peaks = figures(problem, found.cuts, found.options)
    devices = problem.device or tuple(range(len(problem.in_flight)))
    assert found.seconds == pytest.approx(seconds) and found.bytes == tuple(peaks[d] for d in devices)
    assert found.bottleneck == max(found.seconds)
    assert all(p <= c for p, c in zip(peaks, problem.capacity_bytes or peaks, strict=True))
    assert found.bound <= found.bottleneck and found.gap == pytest.approx(1 - found.bound / (found.bottleneck or 1) if found.bottleneck else 0)
    return found


@pytest.mark.parametrize("part", range(5))
def test_equals_exhaustive_search(part: int) -> None:
    refused = bound_by_memory = 0
    for seed in range(100):
        problem = small(Random(100 * part + seed), 1000)
        best = exhaustive_by_stage(problem)
        if seed < 4:
            assert best == exhaustive(problem)
        if best is None:
            with pytest.raises(InfeasibleError, match="too much"):
                balance(problem, gap=0)
            refused += 1
            continue
        found = checked(problem, balance(problem, gap=0))
        assert (found.bottleneck, sum(s * s for s in found.seconds)) == pytest.approx(best, rel=1e-6), (part, seed)
        assert found.gap < 1e-6
        free = balance(replace(problem, capacity_bytes=()), gap=0)
        bound_by_memory += free.bottleneck < found.bottleneck
    assert refused >= 10 and bound_by_memory >= 10


def test_shared_devices_fit_and_their_bound_holds() -> None:
    exact = solved = 0
    for seed in range(60):
        problem = small(Random(seed), 100, shared=True)
        best = exhaustive(problem)
        try:
            found = checked(problem, balance(problem, gap=0))
        except InfeasibleError:
            continue
        assert best is not None and found.bound * (1 - 1e-6) <= best[0] <= found.bottleneck * (1 + 1e-6)
        solved += 1
        exact += found.bottleneck <= best[0] * (1 + 1e-6)
    assert solved >= 40 and exact >= 0.8 * solved


@pytest.mark.parametrize(("blocks", "stages"), [(7, 4), (15, 8)])
def test_tens(blocks: int, stages: int) -> None:
    found = balance(plain(*[10.0] * blocks, stages=stages))
    assert (found.bottleneck, found.gap) == (20.0, 0.0)
    assert sorted(found.seconds) == [10.0] * (2 * stages - blocks) + [20.0] * (blocks - stages)


def test_cuts_are_even_beside_the_bottleneck() -> None:
    assert balance(plain(9, 1, 1, 1, 1, stages=3)).seconds == (9, 2, 2)


def llama(layers: int, stages: int, spare: float) -> Problem:
    """A frontier of eight options a layer, an embedding that holds much, a head that takes long; 1F1B; `spare` of the memory that all would like."""
    layer = tuple(
        Option(0.0312 + 0.00171 * r**1.6, 51_000_000_123, 1_310_720_000 - 161_803_398 * r + 1_234 * r * r, 2_000_000_000 + 90_000_017 * r)
        for r in range(8)
    )
    blocks = (
        (Option(0.0021, 34_000_000_000, 134_217_728, 1_000_000_000),),
        *[layer] * layers,
        (Option(0.0437, 34_000_000_000, 268_435_456, 9_000_000_000),),
    )
    in_flight = tuple(stages - k for k in range(stages))
    each = layers / stages
    wish = [each * (layer[0].persistent_bytes + f * layer[0].saved_bytes) + 4_000_000_000 for f in in_flight]
    capacity = int(spare * max(wish))
    return Problem(blocks, in_flight, (capacity,) * stages, (0.0007,) * len(blocks), (33_554_432,) * len(blocks))


@pytest.mark.parametrize("spare", [0.8, 0.88, 0.95])
def test_a_deep_chain_is_quick(spare: float) -> None:
    problem = llama(126, 16, spare)
    start = time.process_time()
    found = checked(problem, balance(problem))
    assert time.process_time() - start < 2.0
    assert found.gap <= 1e-3
    assert len(set(found.options)) > 2, "memory binds"


def test_what_does_not_fit_is_named() -> None:
    option = Option(1.0, 10_000_000_000, 1_000_000_000, 500_000_000)
    problem = Problem(((option,),) * 6, (3, 2, 1), (26_000_000_000,) * 3)
    with pytest.raises(InfeasibleError) as refused:  # two blocks a stage: the first takes 20 + 3 * 2 + 0.5 GB
        balance(problem)
    assert str(refused.value).startswith(
        "no cut of 6 blocks into 3 stages fits: at best stage 0 (blocks 0 to 1) needs 26.5 GB with its leanest options and 3 micro-batches in "
        "flight, and may hold 26.0 GB: 500 MB too much. Ways out: devices with more memory, more stages, "
    )
    assert balance(replace(problem, in_flight=(2, 2, 1))).cuts == (2, 4)
    with pytest.raises(InfeasibleError, match=r"was found to fit: at best stage 0 .* has as its even share of a device 26\.0 GB"):
        balance(replace(problem, capacity_bytes=(52_000_000_000, 26_000_000_000), device=(0, 1, 0), in_flight=(4, 4, 4)))


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="3 blocks cannot be cut into 4 stages, each needs one; take at most 3 stages"):
        balance(plain(1, 2, 3, stages=4))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda: Problem(((Option(1.0),), ()), (1,)), "block 1 has no option"),
        (lambda: Problem(((Option(1.0),),), ()), "there is no stage"),
        (lambda: Problem(((Option(float("nan")),),), (1,)), "nan is no amount"),
        (lambda: Problem(((Option(1.0),),), (1,), (1, 2)), "capacity_bytes has 2 numbers; 1 blocks in 1 stages take 1, or none"),
        (lambda: Problem(((Option(1.0),),), (1,), edge_bytes=(0, 0)), "edge_bytes has 2 numbers"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(problem: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem()  # type: ignore[operator]
