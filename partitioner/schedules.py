"""Pipeline schedules as plain data: per pipeline rank the order of its turns, for any number of stages and micro-batches.

A model is cut into chunks 0 … C-1 in model order; `stage_of` says which rank runs a chunk. Each chunk has per micro-batch one forward (F) and
one whole backward (B), or its two halves: gradients of the inputs (I), which the chunk before waits for, and of the weights (W), which
nobody waits for. What a turn waits for is `needs`:

    F(c, m) after F(c-1, m)        B(c, m) after F(c, m) and B(c+1, m), I(c, m) likewise        W(c, m) after I(c, m)

One mechanism makes all five. A rank has *queues* of turns, best first; whenever it is free it runs the head of the first queue whose needs
are met (`_play`, a simulation with unit or given durations). Forwards and backwards of one queue alternate after a warm-up of w forwards:

| name | chunks of rank r | queues, best first | w | after |
|---|---|---|---|---|
| gpipe | r | F with B | all | Huang et al. 2018 |
| 1f1b | r | F with B | S-r-1 | Narayanan et al. 2019 |
| interleaved | r, r+S, … (V of them) | F with B, g micro-batches through all chunks, then the next g | (V-1) g + 2 (S-r-1) | Narayanan et al. 2021 |
| zb-h1 | r | F with I; W | S-r-1 | Qi et al. 2023 |
| zb-v | r, 2S-1-r | I of the first; of the second; F of the second; of the first; W (or FORWARDS_FIRST) | | Qi et al. 2024 |
| 2bw | r | F with B, over the end of the step | S-r-1 | Narayanan et al. 2021, PipeDream-2BW |

2bw is asynchronous: the w backwards that a rank has not run when its step ends are the first of its next step, so that nobody waits for the pipeline
to empty. A turn's micro-batch is negative there: -1 is the last one of the batch before. What it trains is another rule (runtime/steps.py), so it is
never chosen unasked (`NAMES` is what a planner may choose from).

So W fills what would be waits. With split backwards a rank takes in a micro-batch only while fewer than S are under way in it (from its first F
to its last W), which is what the fullest rank of 1F1B holds. Orders of a single queue do not depend on durations. In turns of equal length a
rank is idle for 3 (S-1) of them with gpipe and 1f1b, 3 (S-1) / V interleaved, S-1 with zb-h1 and (S-1) / 2 with zb-v, if micro-batches suffice.

No order can deadlock: the turns of each schedule can be numbered so that all follow what they wait for and their forerunners in their queues;
then the least one not yet run can always run. gpipe: every F before every B. zb-v: micro-batch by micro-batch. The others: F number i of rank r
gets 2i + ar, B (or I) number k gets 2k + 2w(r) + 1 + ar, W follows its I; a = 1, or 2 where interleaved, with g >= S for the seam between ranks
S-1 and 0. With fewer micro-batches than stages there is one group, no F comes after a B of any chunk but the last, and a = 0+ serves: those B
come last of all.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from math import inf
from typing import Literal, NamedTuple

Name = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "2bw"]
Op = Literal["F", "B", "I", "W"]
NAMES: tuple[Name, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
ASYNCHRONOUS: tuple[Name, ...] = ("2bw",)


class Turn(NamedTuple):
    """One rank at work on one micro-batch (`mb`, from 0; -1: the last of the batch before) in one chunk of the model (from 0, in model order)."""

    op: Op
    chunk: int
    mb: int

    def __str__(self) -> str:
        return f"{self.op}{self.chunk}.{self.mb}"


Seconds = Callable[[Turn], float]
Order = tuple[tuple[Turn, ...], ...]
"""Per pipeline rank its turns, first to last."""

FORWARDS_FIRST = (2, 3, 4, 1, 0, 5)
"""Another order of zb-v's six queues, better where the stages do not divide the micro-batches (the best of all 720 on such)."""


def chunks_of(name: Name, stages: int, per_stage: int = 2) -> int:
    """How many chunks the model is cut into for `stages` pipeline ranks; per_stage counts only when interleaved."""
    return stages * {"interleaved": per_stage, "zb-v": 2}.get(name, 1)


def stage_of(name: Name, chunk: int, stages: int) -> int:
    """The pipeline rank that runs `chunk`."""
    if name == "zb-v":
        return min(chunk, 2 * stages - 1 - chunk)  # down and up again: rank 0 has the first and the last chunk
    return chunk % stages


def owed(name: Name, stages: int, rank: int) -> int:
    """How many backwards a rank leaves to its next step."""
    return stages - 1 - rank if name in ASYNCHRONOUS else 0


def repeated(turns: Order, micro_batches: int, steps: int) -> Order:
    """The turns of so many steps, the first with nothing owed; micro-batches are counted on from step to step."""
    return tuple(
        tuple(Turn(op, chunk, number) for step in range(steps) for op, chunk, mb in order if (number := step * micro_batches + mb) >= 0)
        for order in turns
    )


def needs(turn: Turn, chunks: int) -> list[Turn]:
    """The turns, of any rank, that must be over before `turn` begins, in a model of `chunks` chunks."""
    op, chunk, mb = turn
    if op == "F":
        return [Turn("F", chunk - 1, mb)] if chunk else []
    if op == "W":
        return [Turn("I", chunk, mb)]
    return [Turn("F", chunk, mb), *([Turn(op, chunk + 1, mb)] if chunk + 1 < chunks else [])]


def schedule(name: Name, stages: int, micro_batches: int, per_stage: int = 2, *, seconds: Seconds | None = None) -> Order:
    """Per pipeline rank the turns in order. zb-h1 and zb-v are the quickest of a few orders, by the `seconds` of each turn (default: 1 each).

    Raises ValueError for an unknown name and for counts below 1.
    """
    if name not in (*NAMES, *ASYNCHRONOUS):
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join((*NAMES, *ASYNCHRONOUS))}")
    if min(stages, micro_batches, per_stage) < 1:
        raise ValueError(f"{stages} stages of {per_stage} chunks, {micro_batches} micro-batches: each must be at least 1")
    if name in ASYNCHRONOUS:
        return tuple(
            tuple(turn for mb in range(micro_batches) for turn in (Turn("F", rank, mb), Turn("B", rank, mb - owed(name, stages, rank))))
            for rank in range(stages)
        )
    chunks = chunks_of(name, stages, per_stage)
    split = name in ("zb-h1", "zb-v")
    own = [[chunk for chunk in range(chunks) if stage_of(name, chunk, stages) == rank] for rank in range(stages)]

    def waits(turn: Turn) -> list[Turn]:
        if turn.op == "F" and turn.chunk < stages <= turn.mb and split:  # let in only when an earlier one has left
            return needs(turn, chunks) + [Turn("W", chunk, turn.mb - stages) for chunk in own[turn.chunk]]
        return needs(turn, chunks)

    queues = [_queues(name, held, stages, micro_batches) for held in own]
    if not split:
        return tuple(tuple(order) for (order,) in queues)
    preferences = [tuple(range(len(queues[0]))), *([FORWARDS_FIRST] if name == "zb-v" else [])]
    known = seconds or _unit
    orders = [
        _play([[held[q] for q in preference] for held in queues], lambda chunk: stage_of(name, chunk, stages), waits, durations)[0]
        for preference in preferences
        for durations in dict.fromkeys((_unit, known))  # an order made for given durations may be the worse one
    ]
    return min(orders, key=lambda order: makespan(name, order, known))


def _unit(_: Turn) -> float:
    return 1.0


def makespan(name: Name, turns: Order, seconds: Seconds) -> float:
    """Seconds from the first turn to the end of the last when every rank runs its `turns` in order, each as soon as its needs are met.

    Of an asynchronous schedule give the turns of some steps (`repeated`): one more of them takes a step longer.
    Raises ValueError where the orders deadlock.
    """
    stages, chunks = len(turns), 1 + max(turn.chunk for turn in chain(*turns))
    played, end = _play([[order] for order in turns], lambda chunk: stage_of(name, chunk, stages), lambda turn: needs(turn, chunks), seconds)
    if played != turns:
        stuck = ", ".join(str(order[len(done)]) for order, done in zip(turns, played, strict=True) if len(done) < len(order))
        raise ValueError(f"the orders of the ranks deadlock, standing at {stuck}")
    return end


def in_flight(name: Name, stages: int, micro_batches: int, per_stage: int = 2, *, seconds: Seconds | None = None) -> tuple[int, ...]:
    """Per chunk the most micro-batches at once whose F is done and whose B (W where split) is not, counted in the schedule."""
    now = [owed(name, stages, stage_of(name, chunk, stages)) for chunk in range(chunks_of(name, stages, per_stage))]
    most = list(now)
    for turn in chain(*schedule(name, stages, micro_batches, per_stage, seconds=seconds)):
        now[turn.chunk] += {"F": 1, "B": -1, "I": 0, "W": -1}[turn.op]
        most[turn.chunk] = max(most[turn.chunk], now[turn.chunk])
    return tuple(most)


def _queues(name: Name, own: list[int], stages: int, micro_batches: int) -> list[list[Turn]]:
    """The queues, best first, of the rank that runs the chunks `own`."""

    def each(op: Op, chunk: int, mbs: range = range(micro_batches)) -> list[Turn]:
        return [Turn(op, chunk, mb) for mb in mbs]

    if name == "zb-v":
        down, up = own
        return [each("I", down), each("I", up), each("F", up), each("F", down), each("W", down), each("W", up)]
    rounds = max(1, micro_batches // stages)
    groups = [range(micro_batches * k // rounds, micro_batches * (k + 1) // rounds) for k in range(rounds)]
    forwards = [turn for group in groups for chunk in own for turn in each("F", chunk, group)]
    backwards = [turn for group in groups for chunk in reversed(own) for turn in each("I" if name == "zb-h1" else "B", chunk, group)]
    hops = min(len(own), 2) * (stages - 1 - own[0])  # interleaved, forwards alternate with backwards on their way: a hop takes two turns
    warm_up = micro_batches if name == "gpipe" else (len(own) - 1) * max(map(len, groups)) + hops
    pairs = zip_longest(forwards[warm_up:], backwards)
    both = forwards[:warm_up] + [turn for turn in chain.from_iterable(pairs) if turn]
    return [both, each("W", own[0])] if name == "zb-h1" else [both]


def _play(
    queues: Sequence[Sequence[Sequence[Turn]]], rank_of: Callable[[int], int], waits: Callable[[Turn], list[Turn]], seconds: Seconds
) -> tuple[Order, float]:
    """What every rank runs, in order, and the end of the last turn; short of some turns where nobody can go on.

    A free rank looks at the heads of its queues when its own last turn ends and when one of a neighbour's does, so it misses nothing.
    """
    ended: dict[Turn, float] = {}
    ran: list[list[Turn]] = [[] for _ in queues]
    rest = [[((turn, waits(turn)) for turn in queue) for queue in own] for own in queues]
    heads = [[next(queue, None) for queue in own] for own in rest]
    free = [0.0] * len(queues)
    looks = [(0.0, rank) for rank in range(len(queues))]
    while looks:
        now, rank = heapq.heappop(looks)
        if free[rank] > now:
            continue
        for number, head in enumerate(heads[rank]):
            if head is None or any(ended.get(need, inf) > now for need in head[1]):
                continue
            turn = head[0]
            heads[rank][number] = next(rest[rank][number], None)
            ran[rank].append(turn)
            ended[turn] = free[rank] = now + seconds(turn)
            for other in {rank, rank_of(turn.chunk - 1), rank_of(turn.chunk + 1)}:
                if 0 <= other < len(queues):
                    heapq.heappush(looks, (free[rank], other))
            break
    return tuple(map(tuple, ran)), max(free)
