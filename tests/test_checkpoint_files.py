"""Checkpoint files: damage is found and named, an unfinished save leaves the last good version, ranks fail together, strangers' files run no code."""

import json
import os
import pickle
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from partitioner import load_checkpoint
from partitioner.errors import CheckpointError
from partitioner.runtime import checkpoint
from partitioner.runtime.checkpoint_manifest import Manifest, parse
from partitioner.runtime.together import Peers
from tests import ranks
from tests.checkpoint_support import Model, save_plain

CPU = torch.device("cpu")


def marked(number: float) -> Model:
    """A model that can be told from the others by `scale`."""
    model = Model()
    with torch.no_grad():
        model.scale.fill_(number)
    return model


def loaded(path: Path) -> float:
    model = Model()
    load_checkpoint(path, model)
    return model.scale.item()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, of scale 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    for step in (1, 2):
        save_plain(folder, marked(step), step=step)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_the_newest_of_two_versions_is_loaded_and_older_ones_go(copy: Path) -> None:
    assert loaded(copy) == 2 and loaded(copy / "000001-step-1") == 1
    for step in (10, 7):  # the number counts, not the step: a run that went back goes on from where it is
        save_plain(copy, marked(step), step=step)
    assert sorted(path.name for path in copy.iterdir()) == ["000003-step-10", "000004-step-7"]
    assert loaded(copy) == 7


LAST = 1 - 1e-9  # of a file
FILES = st.sampled_from(["manifest.json", "rank-00000.bin", "SHA256SUMS"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=FILES, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), kind=st.sampled_from(["flip", "cut", "remove"]))
@example(file="SHA256SUMS", where=0.5, bit=0, kind="cut")
@example(file="SHA256SUMS", where=LAST, bit=0, kind="cut")
@example(file="SHA256SUMS", where=LAST, bit=0, kind="flip")
def test_any_damage_is_refused_and_the_version_before_is_named(saved: Path, tmp_path: Path, file: str, where: float, bit: int, kind: str) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    path = folder / "000002-step-2" / file
    data = bytearray(path.read_bytes())
    at = int(where * len(data))
    if kind == "flip":
        data[at] ^= 1 << bit
    path.unlink()
    if kind != "remove":
        path.write_bytes(data[:at] if kind == "cut" else data)
    with pytest.raises(CheckpointError, match=r"000002-step-2.* is damaged: ") as caught:
        loaded(folder)
    assert "SHA256SUMS" not in str(caught.value) or file == "SHA256SUMS"
    assert str(caught.value).endswith(f"; to go on from the version before it, load '{folder / '000001-step-1'}'")
    assert loaded(folder / "000001-step-1") == 1


def test_a_save_that_was_cut_short_leaves_the_last_good_version(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*names: Any) -> None:
        raise KeyboardInterrupt  # as a kill, it is not cleaned up after

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_plain(copy, marked(3), step=3)
    (left,) = copy.glob(".writing-*")
    assert (left / "SHA256SUMS").exists() and loaded(copy) == 2
    lone = copy.parent / "lone"
    lone.mkdir()
    shutil.copytree(left, lone / left.name)
    with pytest.raises(CheckpointError, match=r"lone holds no finished checkpoint: the only save was cut short \(\.writing-000003-step-3"):
        loaded(lone)
    save_plain(copy, marked(4), step=4)
    assert sorted(path.name for path in copy.iterdir()) == ["000002-step-2", "000003-step-4"] and loaded(copy) == 4


def test_paths_that_cannot_be(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, message in (
        ("nowhere", r"nowhere does not exist; give the folder that parallel\.save wrote"),
        ("empty", r"empty holds neither a checkpoint of parallel\.save nor \.safetensors files"),
        ("file", r"file is no state dict that can be read without running code from it"),
    ):
        with pytest.raises(CheckpointError, match=message):
            loaded(tmp_path / path)
    with pytest.raises(CheckpointError, match=r"file.* cannot be written \((Not a directory|File exists)\)"):
        save_plain(tmp_path / "file" / "ckpt", Model())


# ------------------------------------------------------------------------------------------------------------- ranks fail together


def each_alone(folder: Path) -> list[str]:
    """What this rank is told when one rank's disk is full, when ranks see other folders, and when they save different things."""
    rank, told = dist.get_rank(), []
    peers = Peers(rank, 2, dist.group.WORLD)
    model = nn.Linear(100, 100)
    here = os.getcwd()

    def attempt(work: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            work()
        told.append(str(caught.value))

    save_plain(folder / "ckpt", model, step=1, peers=peers)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        attempt(lambda: save_plain(folder / "ckpt", model, step=2, peers=peers))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        os.chdir(folder / str(rank))
        attempt(lambda: save_plain(Path("own"), model, step=3, peers=peers))
        save_plain(Path("mine"), model, step=rank)
        attempt(lambda: checkpoint.load("mine", model, None, peers, CPU))
    finally:
        os.chdir(here)
    attempt(lambda: save_plain(folder / "ckpt", model, torch.optim.SGD(model.parameters(), lr=rank + 1), step=4, peers=peers))
    attempt(lambda: checkpoint.load(folder / ("ckpt" if rank else "nowhere"), model, None, peers, CPU))
    assert checkpoint.load(folder / "ckpt", model, None, peers, CPU) == 1
    return told


def test_what_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    first, second = ranks.run(2, each_alone, tmp_path, seconds=60)
    assert first[0] == f"rank 1: {second[0]}" and "rank-00001.bin cannot be written (File too large)" in second[0]
    assert first[1] == f"rank 1: {second[1]}" and "rank 1 does not see own/.writing-000001-step-3" in second[1]
    assert first[2] == second[2] and first[2].startswith("the ranks see different files at 'mine'")
    assert first[3] == second[3] and first[3].startswith("the ranks save different things")
    assert second[4] == f"rank 0: {first[4]}" and "nowhere does not exist" in first[4]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["000001-step-1"]


# --------------------------------------------------------------------------------------------------------------- files of strangers


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_is_run_from_a_file(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"scale": Trap(sprung)}, tmp_path / "torch.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap(sprung)))
    for name in ("torch.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=r"is no state dict that can be read without running code from it"):
            loaded(tmp_path / name)
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "holds a list, not a state dict"),
        ({"model": {"a": torch.ones(1)}}, r"holds a dict under 'model', not only tensors; write torch\.save\(model\.state_dict\(\), path\)"),
        ({"a": torch.eye(3).to_sparse()}, "holds a sparse tensor under 'a'"),
    ],
)
def test_a_file_that_holds_other_things(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "../a.safetensors"}}', "is no index of .safetensors files: the file name '../a.safetensors'"),
        ('{"weight_map": ["a"]}', "is no index"),
        ("{}", "is no index"),
        ('{"weight_map": {"a": "a.safetensors"}}', r"a\.safetensors .*(No such file|damaged)"),
        (None, r"holds 2 \.safetensors files but no model\.safetensors\.index\.json"),
    ],
)
def test_an_index_of_another_kind(tmp_path: Path, index: str | None, message: str) -> None:
    for name in "bc":
        (tmp_path / f"{name}.safetensors").write_bytes(b"no header")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path)
    with pytest.raises(CheckpointError, match=r"b\.safetensors is damaged or no safetensors file"):
        loaded(tmp_path / "b.safetensors")


def test_without_safetensors_its_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"which is not installed; write: pip install 'torch-partitioner\[safetensors\]'"):
        loaded(tmp_path)


PIECE = {"file": "rank-00000.bin", "byte": 0, "offsets": [0], "sizes": [4]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "load"}, "'load' is no dtype"),
        ({"dtype": "float32.__class__"}, "is no dtype"),
        ({"shape": [5]}, "do not cover the tensor once"),
        ({"shape": [3]}, "lies outside of its tensor"),
        ({"shape": [2, 2]}, "another number of dims"),
        ({"pieces": [PIECE, PIECE]}, "do not cover the tensor once"),
        ({"pieces": [{**PIECE, "byte": -1}]}, "greater than or equal to 0"),
        ({"shape": [1.5]}, "valid integer"),
        ({"more": 1}, "Extra inputs"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {"dtype": "float32", "shape": [4], "pieces": [PIECE]}
    whole = {"format": 1, "step": 1, "ranks": 1, "tensors": {"model/a": good}}
    assert parse(json.dumps(whole), "here").tensors["model/a"].shape == (4,)
    with pytest.raises(CheckpointError, match=f"^here is no manifest that this version reads: tensors.model/a.*{message}"):
        parse(json.dumps({**whole, "tensors": {"model/a": {**good, **changes}}}), "here")
    with pytest.raises(CheckpointError, match="another name of 'c', which is not saved"):
        parse(json.dumps({**whole, "aliases": {"b": "c"}}), "here")


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=5))
def test_any_text_is_a_manifest_or_is_refused(value: Any) -> None:
    for key in Manifest.model_fields:
        try:
            parse(json.dumps({"format": 1, "step": 1, "ranks": 1, "tensors": {}, key: value}), "here")
        except CheckpointError as error:
            assert "here is no manifest" in str(error)
