"""Plan and cluster files as an enemy would write them: real ones with bytes flipped, cut, spliced, numbers swapped, trees edited."""

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from partitioner import Plan
from partitioner.cluster import Cluster
from partitioner.errors import ClusterError, PlanError

CLUSTERS = Path(__file__).parent.parent / "partitioner" / "clusters"
NUMBERS = [
    "NaN", "Infinity", "-Infinity", "nan", "inf", "-1", "-0.0", "0", "1", "1e999", "-1e999", "1e308", "5e-324", "9007199254740993", "1" + "0" * 400,
    "9" * 5000, "0x10", "01", "1.", "1_000", "true", "null", '"7"', "[]", "{}", "1e-400", "2026-12-02",
]  # fmt: skip
BYTES = [
    b"\x00",
    b"\xff",
    b"\xc3\x28",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\x1b[31m",
    b"\r",
    b'"',
    b"{",
    b"[",
    b"}",
    b"]",
    b",",
    b"\\u0000",
    b"\\ud800",
]
_NUMBER = re.compile(rb"-?\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?")
_LEAVES: SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([10**400, "x" * 5000])
_TREES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8)


@st.composite
def bytes_changed(draw: DrawFn, base: bytes) -> bytes:
    """A few bytes overwritten, inserted, removed, doubled; or the end cut off."""
    data = bytearray(base)
    for _ in range(draw(st.integers(1, 6))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 200))
        match draw(st.sampled_from(["flip", "insert", "remove", "double", "cut"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                data[at:at] = draw(st.sampled_from(BYTES)) * draw(st.sampled_from([1, 1, 1, 50_000]))
            case "remove":
                del data[at : at + length]
            case "double":
                data[at:at] = data[at : at + length] * draw(st.sampled_from([1, 1, 20, 2000]))
            case "cut":
                del data[at:]
    return bytes(data)


@st.composite
def numbers_swapped(draw: DrawFn, base: bytes) -> bytes:
    """Numbers replaced by what no field takes, or takes only just."""
    for _ in range(draw(st.integers(1, 3))):
        found = list(_NUMBER.finditer(base))
        if not found:
            break
        number = draw(st.sampled_from(found))
        base = base[: number.start()] + draw(st.sampled_from(NUMBERS)).encode() + base[number.end() :]
    return base


@st.composite
def tree_edited(draw: DrawFn, base: bytes) -> bytes:
    """JSON with values removed, replaced, renamed, exchanged, repeated and buried."""
    tree = json.loads(base)
    for _ in range(draw(st.integers(1, 3))):
        node: Any = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(node[key], dict | list) or draw(st.booleans()):
                _edit(draw, node, key, tree)
                break
            node = node[key]
    return json.dumps(tree).encode()


def _edit(draw: DrawFn, node: Any, key: Any, tree: Any) -> None:
    match draw(st.sampled_from(["remove", "replace", "rename", "exchange", "repeat", "bury"])):
        case "remove":
            del node[key]
        case "replace":
            node[key] = draw(_TREES)
        case "rename" if isinstance(node, dict):
            node[draw(st.text(max_size=20))] = node.pop(key)
        case "exchange":
            other = draw(st.sampled_from(list(tree)))
            node[key] = json.loads(json.dumps(tree[other]))
        case "repeat":
            count = draw(st.sampled_from([2, 100, 10_000]))
            value = node[key]
            if isinstance(value, list):
                node[key] = (value * count)[:60_000]
            elif isinstance(value, dict) and value:
                some = next(iter(value.values()))
                value.update({f"more {i}": some for i in range(min(count, 20_000))})
            elif isinstance(value, str):
                node[key] = value * count
        case "bury":
            for _ in range(draw(st.sampled_from([1, 100, 400]))):
                node[key] = [node[key]]


def plan_files(bases: list[bytes]) -> SearchStrategy[bytes]:
    """Plan files made of these."""
    return st.sampled_from(bases).flatmap(lambda base: bytes_changed(base) | numbers_swapped(base) | tree_edited(base))


def cluster_files() -> SearchStrategy[bytes]:
    """Cluster files made of the presets."""
    bases = [path.read_bytes() for path in sorted(CLUSTERS.glob("*.toml"))]
    return st.sampled_from(bases).flatmap(lambda base: bytes_changed(base) | numbers_swapped(base))


def read_plan(path: Path) -> bool:
    """Whether the file is read, and then also shown, explained, compared and written again; False where it is refused as it should be."""
    try:
        plan = Plan.load(path)
    except PlanError as error:
        _one_short_message(error)
        return False
    shown = (str(plan), plan.explain(), plan.diff(plan))
    assert not any(set(text) - {"\n"} and not text.replace("\n", "").isprintable() for text in shown)
    assert Plan.from_json(plan.to_json()) == plan
    return True


def read_cluster(path: Path) -> bool:
    """Whether the file is read; False where it is refused as it should be."""
    try:
        str(Cluster.load(path))
    except ClusterError as error:
        _one_short_message(error)
        return False
    return True


def _one_short_message(error: Exception) -> None:
    message = str(error)
    assert 0 < len(message) < 3000
    message.encode()
