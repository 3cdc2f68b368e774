"""A few hundred files of an enemy. `python -m benchmarks.fuzz` reads ten thousand, and measures seconds and bytes."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partitioner import Plan
from partitioner.cluster import Cluster
from partitioner.errors import ClusterError, PlanError
from partitioner.plan import Alternative, Explanation, MoreMemory
from tests.hostile import CLUSTERS, cluster_files, plan_files, read_cluster, read_plan
from tests.test_plan import plan_of, staged_plan

WAY = Alternative(ranks=4, shard="zero2", checkpoint="none", micro_batches=1, step_seconds=1.5, peak_bytes=10**9)
WHY = Explanation(
    alternatives=(WAY, WAY.model_copy(update={"checkpoint": "full", "peak_bytes": 10**12})),
    more_memory=(MoreMemory(memory_bytes=10**11, step_seconds=1.0, micro_batches=1),),
    compute_seconds=1.0,
    communication_seconds=0.5,
    peak_at="backward of model.layers.3",
)
PLAN = plan_of(explanation=WHY).to_json().encode()
STAGED = staged_plan(schedule="interleaved", explanation=WHY).to_json().encode()
FEW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(data=plan_files([PLAN, STAGED]))
def test_plan_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(data)
    read_plan(path)


@FEW
@given(data=cluster_files())
def test_cluster_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(data)
    read_cluster(path)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=300))
def test_bytes_that_are_no_file_of_ours(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.bin"
    path.write_bytes(data)
    assert not read_plan(path)
    assert not read_cluster(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xef\xbb\xbf" + PLAN)
    assert Plan.load(tmp_path / "plan.json") == plan_of()
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbf" + (CLUSTERS / "h100-sxm.toml").read_bytes())
    assert Cluster.load(tmp_path / "c.toml") == Cluster.preset("h100-sxm")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "away").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "loop", tmp_path / "away", tmp_path / "pipe", Path("/dev/zero"), Path("a\0b"), Path("x" * 5000)):
        with pytest.raises(PlanError):
            Plan.load(path)
        with pytest.raises(ClusterError):
            Cluster.load(path)
    (tmp_path / "real.json").write_bytes(PLAN)
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert Plan.load(tmp_path / "link.json") == plan_of(), "a link to a file is a file"
