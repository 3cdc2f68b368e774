"""Clusters: presets, files from strangers, the `gpus` argument, and the calibration of this machine."""

import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partitioner import calibrate, quantities
from partitioner.cluster import Cluster, Efficiency, Link
from partitioner.errors import ClusterError
from tests import ranks

PRESET = (Path(__file__).parent.parent / "partitioner" / "clusters" / "h100-sxm.toml").read_text()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_PARTITIONER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "_memory", {})
    return tmp_path / "cache"


@pytest.mark.parametrize("name", Cluster.presets())
def test_every_preset_loads_and_names_its_sources(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert cluster.sources
    assert cluster.rate("bfloat16") >= cluster.rate("float32") == cluster.rate("complex64")


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100-sxm", 1, 8),
        ("8 h100-sxm", 1, 8),
        ("2 h100-sxm", 1, 2),
        ("16x8 h100-sxm", 16, 8),
        ("3 x 5 a100-80gb", 3, 5),
        ("24 h100-sxm", 3, 8),
        ("5 cpu-local", 1, 5),
    ],
)
def test_gpus_as_text(text: str, nodes: int, per_node: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.devices) == (nodes, per_node, nodes * per_node)


def test_a_file_is_like_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PRESET.replace("84_900_000_000", '"80GB"'))
    assert Cluster.load(path).memory_bytes == 80 * 10**9
    assert Cluster.parse(str(path)) == Cluster.parse(path) == Cluster.load(path)
    assert Cluster.parse(f"4x8 {path}").nodes == 4
    assert Cluster.parse(Cluster.load(path)) == Cluster.load(path)


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (0, "between 1 and"), (-3, "between 1 and"), (10**400, "more than 10"), (True, "bool"), (2.0, "float"), (None, "NoneType"), ("", "preset"),
        ("h200", "h100-sxm"), ("12 h100-sxm", "2x8 h100-sxm"), ("0x8 h100-sxm", "nodes"), ("9999999x9999 h100-sxm", "nodes"),
        ("nowhere.toml", "cannot be read"),
        ("a\0b.toml", "cannot be read"),
    ],
)  # fmt: skip
def test_gpus_that_are_none(gpus: object, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        Cluster.parse(gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_bytes = 84_900_000_000", "memory_bytes = -1", "memory_bytes"),
        ("memory_bytes = 84_900_000_000", 'memory_bytes = "eighty"', "no amount of memory"),
        ("memory_bytes = 84_900_000_000", "memory_bytes = true", "memory_bytes"),
        ("launch_seconds = 5e-6", "launch_seconds = nan", "finite"),
        ("float32 = 66.9e12", "float32 = inf", "finite"),
        ("float32 = 66.9e12", "float32 = 1e300", "less than"),
        ("float32 = 66.9e12", "", "needs at least float32"),
        ("float32 = 66.9e12", "float31 = 66.9e12", "float31"),
        ("nodes = 1", "nodes = 1\nevil = 2", "evil"),
        ("nodes = 1", f"nodes = {10**40}", "nodes"),
        ("nodes = 1", "nodes = 0", "nodes"),
        ("overlap = true", 'overlap = "yes"', "overlap"),
        ("fraction = 0.72", "fraction = 1.5", "fraction"),
        ('name = "h100-sxm"', "name = ", "no TOML"),
        ('name = "h100-sxm"', "name = " + "[" * 60_000, "no TOML"),
        ('name = "h100-sxm"', "name = '" + "x" * 100_000 + "'", "at most"),
        ('name = "h100-sxm"', "name" + ".a" * 30_000 + " = 1", "more than 200 dots"),
    ],
)
def test_files_that_are_no_clusters(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in PRESET
    path = tmp_path / "bad.toml"
    path.write_text(PRESET.replace(old, new))
    start = time.process_time()
    with pytest.raises(ClusterError, match=says) as error:
        Cluster.load(path)
    assert time.process_time() - start < 1
    assert len(str(error.value)) < 1500


def test_a_pipe_or_a_folder_is_no_cluster_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path, tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(ClusterError):
            Cluster.load(path)
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ClusterError, match="UTF-8"):
        Cluster.load(tmp_path / "binary.toml")


def test_efficiency_grows_with_the_smallest_dim() -> None:
    efficiency = Efficiency(fraction=0.8, half_dim=64.0)
    assert efficiency.at(64) == pytest.approx(0.4)
    assert efficiency.at(16) < efficiency.at(4096) < 0.8


def test_local_figures_are_quick_plausible_and_remembered(cache: Path) -> None:
    start = time.process_time()
    cluster = Cluster.parse(2)
    assert time.process_time() - start < 6  # under 3 s on a quiet machine
    assert (cluster.devices, cluster.device) == (2, "cuda" if torch.cuda.is_available() else "cpu")
    assert 1e8 < cluster.rate("float32") < 1e15
    assert 1e8 < cluster.memory_bytes_per_second < 1e13
    assert 1e-7 < cluster.launch_seconds < 1e-2
    calibrate._memory.clear()
    start = time.process_time()
    assert Cluster.parse(2) == cluster
    assert time.process_time() - start < 0.2
    assert Cluster.parse(8).rate("float32") <= cluster.rate("float32")
    assert Cluster.parse(8).memory_bytes <= cluster.memory_bytes


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[1]", b'{"flops_per_second": {"float32": -1}}', b"\xff\xfe", b"{" * 10**5])
def test_a_corrupt_cache_is_measured_again(cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    known = calibrate.Figures(flops_per_second={"float32": 1e9}, memory_bytes_per_second=1e9, launch_seconds=1e-6, efficiency={})
    monkeypatch.setattr(calibrate, "_measure", lambda device: known)
    Cluster.parse(1)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    calibrate._memory.clear()
    assert Cluster.parse(1).rate("float32") == 1e9
    assert calibrate.Figures.model_validate_json(file.read_bytes()) == known


def test_a_cache_that_cannot_be_written_does_no_harm(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = calibrate.Figures(flops_per_second={"float32": 1e9}, memory_bytes_per_second=1e9, launch_seconds=1e-6, efficiency={})
    monkeypatch.setattr(calibrate, "_measure", lambda device: known)
    cache.write_text("a file where the folder should be")
    assert Cluster.parse(1).rate("float32") == 1e9


def _measured(folder: str) -> list[Link]:
    os.environ["TORCH_PARTITIONER_CACHE"] = folder
    return [calibrate.measure_link(), calibrate.measure_link()]


def test_links_are_measured_together_and_agreed(cache: Path) -> None:
    first, second = ranks.run(2, _measured, str(cache))
    assert first == second
    assert first[0] == first[1], "the second call comes from the cache"
    assert 0 < first[0].alpha_seconds < 1
    assert 1e6 < first[0].bytes_per_second < 1e12


def test_links_need_a_process_group() -> None:
    with pytest.raises(ClusterError, match="init_process_group"):
        calibrate.measure_link()


@pytest.mark.parametrize(
    ("text", "amount"),
    [("16GB", 16 * 10**9), ("512 MiB", 512 * 2**20), ("1.5g", 15 * 10**8), ("100", 100), (7, 7), ("80 GB", 80 * 10**9)],
)
def test_bytes_as_people_write_them(text: str | int, amount: int) -> None:
    assert quantities.parse_bytes(text) == amount


@given(st.one_of(st.text(max_size=30), st.integers(), st.floats(), st.none(), st.booleans()))
def test_other_bytes_are_refused_with_the_given_error(value: object) -> None:
    try:
        assert 0 < quantities.parse_bytes(value, ClusterError) <= quantities.MAX_BYTES  # type: ignore[arg-type]
    except ClusterError as error:
        assert "16GB" in str(error)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (12_345, "12.3 kB"), (999_960, "1.0 MB"), (61.2e9, "61.2 GB"), (123e9, "123 GB")],
)
def test_bytes_as_people_read_them(value: float, text: str) -> None:
    assert quantities.format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (0.25e-6, "0.25 us"), (123.0, "123 s"), (0.9999, "1.00 s")])
def test_seconds_as_people_read_them(value: float, text: str) -> None:
    assert quantities.format_seconds(value) == text
