"""Ranks that die, stop, fail, stay away or differ: every other rank ends in bounded time with an error that says who, where and how to go on."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # defined, but not declared as exported

from partitioner import auto_parallelize, make_plan
from partitioner.errors import LaunchError, NonFiniteError, PartitionerError
from partitioner.runtime import launch
from partitioner.runtime.meeting import meet
from partitioner.runtime.shards import local
from tests import ranks as pool
from tests.fault_ranks import (
    NAMES,
    PEER_SECONDS,
    RATE,
    End,
    Fault,
    endless,
    environment,
    killed,
    leaves_program,
    model,
    new_store,
    raises,
    run,
    step,
    stopped,
    train_in_stages,
)
from tests.small_programs import Chain, eager, leaves

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MOST_SECONDS = 3 * PEER_SECONDS  # for those that must be missed for PEER_SECONDS before, on a busy machine


def train(fault: Fault, at: int) -> float:
    parallel = model(fault, at)
    for _ in range(5):
        loss = step(parallel)
    return loss


def train_and_meet(fault: Fault) -> float:
    parallel = model()
    for _ in range(3):
        loss = step(parallel)
    if parallel._peers.rank == 1:
        fault()
    for _ in range(3):
        loss = step(parallel)
    return loss


def check_survivors(ends: list[End], *parts: str) -> None:
    assert len(ends) == 2
    for end in ends:
        assert (end.kind, end.ranks) == ("PeerError", (1,)), end
        assert end.after < MOST_SECONDS and end.exit_code == 0
        for part in (*parts, "of 3 waited at ", " of program run 3 for ", "parallel.load(folder, optimizer)"):
            assert part in end.text, end.text
        told_why = " failed at " in end.text or " left the process group" in end.text or " ended with " in end.text
        assert ("PARTITIONER_PEER_SECONDS" in end.text) == (not told_why), end.text  # more patience helps with those that said nothing


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (killed, "rank 1 is gone: its process died or is stopped; it was last seen "),
        (stopped, "rank 1 is gone: its process died or is stopped; it was last seen "),
        (endless, "rank 1 did not arrive: it lives, and is still at FORWARD block 1 mb 0 on compute drops v0 of program run 3"),
        (leaves_program, "rank 1 failed at FORWARD block 1 mb 0 on compute drops v0 of program run 3 with SystemExit: 3"),
    ],
)
def test_a_rank_that_is_lost_within_a_step_is_named_on_the_others(fault: Fault, part: str) -> None:
    ends = run(3, train, fault, 6, lost=1)
    check_survivors(ends, part)


def test_an_error_within_a_step_of_one_rank_is_told_to_the_others() -> None:
    first, own, last = run(3, train, raises, 6)
    assert (own.kind, own.text) == ("ValueError", "no rows left")
    check_survivors([first, last], "rank 1 failed at FORWARD block 1 mb 0 on compute drops v0 of program run 3 with ValueError: no rows left")


def test_a_rank_that_stays_in_its_own_code_did_not_arrive() -> None:
    for end in run(3, train_and_meet, endless, lost=1):
        assert (end.kind, end.ranks) == ("PeerError", (1,)) and end.after < MOST_SECONDS
        assert "rank 1 did not arrive: it lives, and is still in its own code after program run 3" in end.text


@pytest.mark.parametrize(("lost", "fault", "part"), [(2, stopped, "rank 2 is gone"), (1, killed, "rank 1 is gone")])
def test_a_rank_of_a_pipeline_that_is_lost_is_named_on_all_others(lost: int, fault: Fault, part: str) -> None:
    ends = run(4, train_in_stages, lost, fault, 6, lost=lost)
    assert len(ends) == 3
    for end in ends:
        assert (end.kind, end.ranks, end.exit_code) == ("PeerError", (lost,), 0), end
        assert part in end.text and " of 4 waited at " in end.text and "parallel.load(folder, optimizer)" in end.text
        assert end.after < MOST_SECONDS


def test_an_error_of_one_stage_is_told_to_the_others() -> None:
    *others, own = run(4, train_in_stages, 3, raises, 6)
    assert (own.kind, own.text) == ("ValueError", "no rows left")
    for end in others:
        assert (end.kind, end.ranks) == ("PeerError", (3,)), end
        assert "rank 3 failed at FORWARD block " in end.text and "with ValueError: no rows left" in end.text


# --- whole processes, to their end -------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "part"), [("raises", "rank 1 ended with ValueError: no rows left"), ("stopped", "rank 1 is gone")])
def test_processes_end_with_an_error_that_names_the_rank(fault: str, part: str) -> None:
    store = new_store()
    line = [sys.executable, "-m", "tests.fault_script", fault]
    processes = [
        subprocess.Popen(line, env={**os.environ, **environment(rank, 2, store.port)}, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        _, said = processes[0].communicate(timeout=90)
        assert processes[0].returncode == 1
        assert "partitioner.errors.PeerError: rank 0 of 2 waited " in said and part in said, said
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def test_torchrun_starts_the_ranks_again_and_the_losses_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = [str(EXAMPLES / "survive_a_failure.py"), "--kill-at", "7", "--steps", "10", "--folder", str(tmp_path / "disturbed")]
    path = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([*line, *script], env={**os.environ, **NAMES, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    found = [(int(words[1]), float(words[3])) for words in map(str.split, done.stdout.splitlines())]
    undisturbed = pool.run(2, "examples.survive_a_failure:train", tmp_path / "undisturbed", 10, 3, group=False)[0]
    assert [step for step, _ in found] == [6, 7, 8, 9] and [step for step, _ in undisturbed] == list(range(10))
    assert [f"{loss:.9f}" for _, loss in undisturbed[6:]] == [f"{loss:.9f}" for _, loss in found]


# --- errors of one rank that all can go on from ------------------------------------------------------------------


def wrong_then_right(changes: dict[str, Any]) -> tuple[str, str, float]:
    parallel = model()
    step(parallel)
    given = changes if parallel._peers.rank == 1 else {}
    try:
        step(parallel, **given)
    except Exception as error:
        return type(error).__name__, str(error), step(parallel)
    raise AssertionError("the wrong call was taken")


def test_an_input_that_one_rank_refuses_is_refused_by_all_and_they_go_on() -> None:
    first, own, last = (end.result for end in run(3, wrong_then_right, {"targets": leaves(7)["targets"].double()}))
    assert own[0] == "InputError" and "targets has dtype torch.float64" in own[1]
    for kind, text, _ in (first, last):
        assert kind == "RankError" and "1 of 3 ranks differ from rank 0. rank 1: the call is refused with InputError: targets has dtype" in text
    assert first[2] == own[2] == last[2]


def test_another_batch_on_one_rank_is_refused_by_all_and_they_go_on() -> None:
    results = [end.result for end in run(3, wrong_then_right, leaves(6))]
    for kind, text, loss in results:
        assert kind == "RankError" and "rank 1: the inputs: args[0] is (6, 16), torch.float32, on rank 0 (7, 16), torch.float32" in text
        assert loss == results[0][2]


def skip_what_is_not_finite(spoiled: str) -> tuple[str, list[float]]:
    parallel = model()
    losses = [step(parallel)]
    given = leaves(7)
    if spoiled == "input":
        given["targets"][6, 3] = float("nan")  # of the last rank's rows
        given["targets"][0, 0] = float("inf")
    elif spoiled == "parameter":
        with torch.no_grad():
            local(parallel.layers[1].weight)[:1, :1] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        step(parallel, **given)
    if spoiled == "input":
        for parameter in parallel.parameters():
            parameter.grad = None
        losses.append(step(parallel))
    return str(caught.value), losses


def test_a_loss_that_is_not_finite_is_refused_by_all_who_then_take_the_next_batch() -> None:
    results = [end.result for end in run(3, skip_what_is_not_finite, "input")]
    plain = Chain(2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    expected = []
    for _ in range(2):
        expected.append(float(eager(plain, leaves(7))))
        optimizer.step()
        optimizer.zero_grad()
    for text, losses in results:
        assert text == results[0][0]
        assert "step 1: the loss of this batch is nan" in text
        assert "the first value that is nan is met in block loss, micro-batch 0 on rank 2: the input targets" in text
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_parameter_that_is_not_finite_is_named() -> None:
    for end in run(3, skip_what_is_not_finite, "parameter"):
        text, _ = end.result
        assert "nan is met in block layers.1, micro-batch 0 on rank 0: the parameter layers.1.weight" in text


# --- ranks that differ from the start ----------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


def mean(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def total(output: Tensor) -> Tensor:
    return output.pow(2).sum()


def start_with(other: dict[str, Any]) -> str:
    """What auto_parallelize refuses where rank 1 calls it with `other`; a plan is given by the micro-batches it has."""
    mine = other if os.environ["RANK"] == "1" else {}
    given: dict[str, Any] = {"gpus": "1x3 h100-sxm", "example_inputs": (torch.zeros(6, 4),), "loss": mean, "memory": "1GB", "verify": False}
    given |= {name: value for name, value in mine.items() if name not in ("width", "torch", "plan")}
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in mine:
            patch.setattr(torch, "__version__", mine["torch"])
        if "plan" in other:
            given["plan"] = make_plan(Wide(8), **given, constraints={"micro_batches": mine.get("plan", 1)})
        with pytest.raises(PartitionerError) as caught:
            auto_parallelize(Wide(mine.get("width", 8)), **given)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("other", "part"),
    [
        ({"width": 9}, "rank 1: the model's first.bias is torch.float32 [9] with gradient, on rank 0 torch.float32 [8] with gradient"),
        ({"torch": "2.11.0"}, "rank 1: the version of torch is 2.11.0, on rank 0 2."),
        ({"memory": "2GB"}, "rank 1: memory is 2000000000 bytes, on rank 0 1000000000 bytes"),
        ({"loss": total}, "rank 1: loss is total, on rank 0 mean"),
        ({"constraints": {"shard": "zero3"}}, "rank 1: constraints is {'shard': 'zero3'}, on rank 0 {}"),
        ({"example_inputs": (torch.zeros(7, 4),)}, "rank 1: the example inputs: args[0] is torch.float32 [7, 4], on rank 0 torch.float32 [6, 4]"),
        ({"plan": 2}, "rank 1: the plan is "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_that_start_differently_are_refused_together_with_the_difference(other: dict[str, Any], part: str) -> None:
    texts = pool.run(3, start_with, other, group=False)
    assert len(set(texts)) == 1 and texts[0].startswith("RankError: 1 of 3 ranks differ from rank 0. ") and part in texts[0], texts


def test_an_argument_that_one_rank_refuses_is_refused_by_all() -> None:
    first, own, last = pool.run(3, start_with, {"precision": "fp7"}, group=False)
    assert own.startswith("PartitionerError: precision='fp7' is not available")
    assert first == last and first.startswith("RankError: rank 1: precision='fp7' is not available")


# --- meeting -----------------------------------------------------------------------------------------------------


def meet_all(store: HashStore, ranks: int, starts: list[float]) -> list[str]:
    marks = [""] * ranks

    def come(rank: int) -> None:
        time.sleep(starts[rank])
        marks[rank] = meet(store, rank, ranks, 20.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return marks


@pytest.mark.parametrize("starts", [[0.0, 0.0, 0.0], [0.3, 0.0, 0.1], [0.0, 0.3, 0.1]])
def test_ranks_meet_again_on_a_store_that_still_holds_an_earlier_try(starts: list[float]) -> None:
    store = HashStore()
    first, second = meet_all(store, 3, starts[::-1]), meet_all(store, 3, starts)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(LaunchError, match=r"of 3 ranks, 1, 2 did not call auto_parallelize within 0\.1 s of rank 0"):
        meet(HashStore(), 0, 3, 0.1)
    with pytest.raises(LaunchError, match=r"rank 0 did not call auto_parallelize within 0\.1 s of rank 2"):
        meet(HashStore(), 2, 3, 0.1)


# --- the watch itself --------------------------------------------------------------------------------------------


def rank_zero_takes_long(fault: Fault | None) -> int:
    ranks = launch.join(3)
    if ranks.rank == 0:
        time.sleep(0.5)
        if fault is not None:
            fault()
        time.sleep(1.2 * PEER_SECONDS)
    return launch.broadcast_object(7 if ranks.rank == 0 else None, ranks) + len(ranks.together(lambda: time.sleep(ranks.rank * 0.6 * PEER_SECONDS)))


def test_work_that_takes_long_is_waited_for_while_its_rank_lives() -> None:
    assert [end.result for end in run(3, rank_zero_takes_long, None)] == [10, 10, 10]


def test_a_rank_that_dies_at_such_work_is_named() -> None:
    for end in run(3, rank_zero_takes_long, killed, lost=0):
        assert (end.kind, end.ranks) == ("PeerError", (0,)) and "rank 0 is gone" in end.text and "for what rank 0 decides" in end.text


_kept: list[Any] = []


def keep_the_group() -> int:
    """How many threads of this process watch, where something holds the group of an earlier launch (torch's caches of DTensor operations may)."""
    _kept.append(launch.join(2).group)
    return sum(thread.name == "partitioner-watch" for thread in threading.enumerate())


def test_a_group_that_was_destroyed_is_not_watched_at_the_next_launch() -> None:
    assert [pool.run(2, keep_the_group) for _ in range(3)] == [[1, 1]] * 3
