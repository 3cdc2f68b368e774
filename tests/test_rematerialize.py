"""The frontier against exhaustive search on small random graphs, and against torch's own options on a Llama block."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.passes.rematerialize import Point, RematProblem, Value, frontier, price


@st.composite
def problems(draw: st.DrawFn) -> RematProblem:
    """Random graphs with views, multi-output ops, free and unrepeatable values, and values that only backward's formulas use."""
    values: list[Value] = []
    storage_bytes: dict[str, int] = {}
    for k in range(draw(st.integers(1, 9))):
        name = f"v{k}"
        inputs = tuple(v.name for v in values if draw(st.integers(0, 2)) == 0)
        late = any(v.late for v in values if v.name in inputs) or draw(st.integers(0, 3)) == 0
        kind = draw(st.sampled_from(["op", "op", "op", "op", "view", "tuple", "free", "once"]))
        if kind == "view":
            bases = [v for v in values if v.storage]
            if bases:
                base = draw(st.sampled_from(bases))
                values.append(Value(name, (base.name,), 0.0, base.storage, late=late or base.late))
                continue
        if kind == "free":
            storage_bytes[name] = draw(st.integers(0, 9))
            values.append(Value(name, storage=name, free=True))
            continue
        seconds = float(draw(st.integers(0, 9)))
        if kind == "tuple":
            values.append(Value(name, inputs, seconds, None, late=late))
            continue
        storage_bytes[name] = draw(st.integers(0, 9))
        picks = [v for v in values if v.storage is None]
        if picks and draw(st.booleans()):
            pick = draw(st.sampled_from(picks))
            values.append(Value(name, (pick.name,), 0.0, name, late=late or pick.late))
        else:
            values.append(Value(name, inputs, seconds, name, recomputable=kind != "once", late=late))
    needed = frozenset(v.name for v in values if draw(st.booleans()))
    return RematProblem(tuple(values), storage_bytes, needed)


def everything(problem: RematProblem) -> list[tuple[int, float]]:
    """The Pareto frontier by trying every set of storages."""
    representatives = {v.storage: v.name for v in reversed(problem.values) if v.storage is not None}
    points = set()
    for size in range(len(representatives) + 1):
        for names in combinations(representatives.values(), size):
            try:
                point = price(problem, names)
            except ValueError:
                continue
            points.add((point.saved_bytes, point.recompute_seconds))
    return sorted(p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points))


@settings(max_examples=400, deadline=None)
@given(problems())
def test_equals_exhaustive_search(problem: RematProblem) -> None:
    points = frontier(problem)
    assert [(p.saved_bytes, p.recompute_seconds) for p in points] == everything(problem)
    for point in points:
        assert price(problem, point.saved) == point


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(2, 4))
def test_a_limit_thins_but_every_point_stays_optimal(problem: RematProblem, limit: int) -> None:
    every = everything(problem)
    points = [(p.saved_bytes, p.recompute_seconds) for p in frontier(problem, limit)]
    assert len(points) == min(limit, len(every))
    assert points[0] == every[0] and points[-1] == every[-1]
    assert set(points) <= set(every)
