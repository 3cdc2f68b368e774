"""Pipeline schedules as plain data: per pipeline rank the order of its turns, for any number of stages and micro-batches.

A model is cut into chunks 0 … C-1 in model order; `stage_of` says which rank runs a chunk. Each chunk has per micro-batch one forward (F) and
one whole backward (B), or its two halves: gradients of the inputs (I), which the chunk before waits for, and of the weights (W), which
nobody waits for. What a turn waits for is `needs`:

    F(c, m) after F(c-1, m)        B(c, m) after F(c, m) and B(c+1, m), I(c, m) likewise        W(c, m) after I(c, m)

One mechanism makes all five. A rank has *queues* of turns, best first; whenever it is free it runs the head of the first queue whose needs
are met (`_play`, a simulation with unit or given durations). Forwards and backwards of one queue alternate after a warm-up of w forwards:

| name | chunks of rank r | queues | w |
|---|---|---|---|
| gpipe | r | forwards and B | all |
| 1f1b | r | forwards and B | S-r-1                          Narayanan et al. 2019 |
| interleaved | r, r+S, … (V) | forwards and B, in groups of g micro-batches | (V-1) g + 2 (S-r-1)      Narayanan et al. 2021, section 2.2 |
| zb-h1 | r | forwards and I; W | S-r-1                          Qi et al. 2023, section 2.2 |
| zb-v | r, 2S-1-r | I of either chunk; forwards of the second, of the first; W | Qi et al. 2023, section 6 |

So W fills the waits of the zero-bubble schedules. There a rank takes in a micro-batch only while fewer than S are under way in it (first F to
last W): as many as the fullest rank of 1F1B holds. Orders of a single queue do not depend on durations.

No order can deadlock. Single queue: give F number i of rank r the time 2i + ar and B number k the time 2k + 2w(r) + 1 + ar, where a = 0+ for
gpipe and 1F1B and a = 2 for interleaved: every turn comes after what it needs and after its forerunner in the queue. (Across the seam from rank
S-1 to 0 that takes g >= S. With fewer micro-batches than stages there is one group; then no F waits for a B across the seam, and a = 0+ will
do.) Several queues: whatever is run, it cannot be in the way. Take the first micro-batch that is unfinished anywhere. If none of its W is due, its
next F or I has its needs met, and it is let in, for micro-batches enter a rank in order and all those before it have left.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from math import inf
from typing import Literal, NamedTuple

Name = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
Op = Literal["F", "B", "I", "W"]
NAMES: tuple[Name, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


class Turn(NamedTuple):
    """One rank at work on one micro-batch (`mb`, from 0) in one chunk of the model (from 0, in model order)."""

    op: Op
    chunk: int
    mb: int

    def __str__(self) -> str:
        return f"{self.op}{self.chunk}.{self.mb}"


Seconds = Callable[[Turn], float]
Order = tuple[tuple[Turn, ...], ...]
"""Per pipeline rank its turns, first to last."""


def chunks_of(name: Name, stages: int, per_stage: int = 2) -> int:
    """How many chunks the model is cut into for `stages` pipeline ranks; per_stage counts only when interleaved."""
    return stages * {"interleaved": per_stage, "zb-v": 2}.get(name, 1)


def stage_of(name: Name, chunk: int, stages: int) -> int:
    """The pipeline rank that runs `chunk`."""
    if name == "zb-v":
        return min(chunk, 2 * stages - 1 - chunk)  # down and up again: rank 0 has the first and the last chunk
    return chunk % stages


def needs(turn: Turn, chunks: int) -> list[Turn]:
    """The turns, of any rank, that must be over before `turn` begins, in a model of `chunks` chunks."""
    op, chunk, mb = turn
    if op == "F":
        return [Turn("F", chunk - 1, mb)] if chunk else []
    if op == "W":
        return [Turn("I", chunk, mb)]
    return [Turn("F", chunk, mb), *([Turn(op, chunk + 1, mb)] if chunk + 1 < chunks else [])]


def schedule(name: Name, stages: int, micro_batches: int, per_stage: int = 2, *, seconds: Seconds | None = None) -> Order:
    """Per pipeline rank the turns in order. `seconds` (of a turn; default: 1 each) shapes zb-h1 and zb-v only.

    Raises ValueError for an unknown name and for counts below 1.
    """
    if name not in NAMES:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(NAMES)}")
    if min(stages, micro_batches, per_stage) < 1:
        raise ValueError(f"{stages} stages of {per_stage} chunks, {micro_batches} micro-batches: each must be at least 1")
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
    return _play(queues, lambda chunk: stage_of(name, chunk, stages), waits, seconds or (lambda _: 1.0))[0]


def makespan(name: Name, turns: Order, seconds: Seconds) -> float:
    """Seconds from the first turn to the end of the last when every rank runs its `turns` in order, each as soon as its needs are met.

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
    now = [0] * chunks_of(name, stages, per_stage)
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
        soon = inf
        for number, head in enumerate(heads[rank]):
            if head is None:
                continue
            turn, before = head
            due = max((ended.get(need, inf) for need in before), default=0.0)
            if due > now:
                soon = min(soon, due)
            elif soon - now < PAT * seconds(turn):
                heapq.heappush(looks, (soon, rank))
                break
            else:
                heads[rank][number] = next(rest[rank][number], None)
                ran[rank].append(turn)
                ended[turn] = free[rank] = now + seconds(turn)
                for other in {rank, rank_of(turn.chunk - 1), rank_of(turn.chunk + 1)}:
                    if 0 <= other < len(queues):
                        heapq.heappush(looks, (free[rank], other))
                break
    return tuple(map(tuple, ran)), max(free)
PAT=0.5
