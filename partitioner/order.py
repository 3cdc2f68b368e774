"""The order of a rank program: which instruction stands where. Prefetch, buckets and overlap are this order and nothing else.

    forward    REFRESH u?  GATHER u?  FORWARD b mb  FREE u?        in block order; a zero3 unit is gathered per use and freed after, unless the
                                                                     next block uses it or it is kept until its backward
    backward   GATHER u?   BACKWARD b mb  FREE u?  REDUCE u         in reverse; a unit is reduced as soon as its last gradient is there:
                                                                     zero2 and zero3 in every micro-batch, none and zero1 in the last

With `prefetch`, the next block's communication is issued before the current block runs, so that it travels beside the computation.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from partitioner.runtime.program import Call, Function, Instruction, Unit

EACH_MICRO_BATCH = ("zero2", "zero3")


@dataclass(frozen=True)
class Order:
    """What the order is made from. `kept` units stay gathered from a forward to its backward; `held` values are needed at the end
    (the loss, outputs, new buffers); price(op, call, micro-batch) and communication(op, bytes) are seconds.
    """

    calls: Sequence[Call]
    functions: dict[str, Function]
    units: Sequence[Unit]
    kept: frozenset[int]
    micro_batches: int
    prefetch: bool
    bytes_of: dict[int, int]  # unit -> bytes of its whole parameters
    held: frozenset[str]
    joined: bool  # False in a forward program: its backward comes later, if at all, so that nothing stays gathered in between
    price: Callable[[str, Call, int], float]
    communication: Callable[[str, int], float]


@dataclass(frozen=True)
class _Use:
    call: Call
    mb: int
    backward: bool
    units: tuple[int, ...]  # whose whole parameters it reads


def arrange(order: Order, *, backward: bool) -> tuple[list[Instruction], list[Instruction]]:
    """All forwards and (when `backward`) backwards in the order of execution, as what stands before the first backward and from it on."""
    return _Writer(order, backward).write()


class _Writer:
    def __init__(self, order: Order, backward: bool) -> None:
        self.order = order
        self.out: list[Instruction] = []
        self.unit_of = {name: unit.number for unit in order.units for name in unit.parameters}
        self.shard = {unit.number: unit.shard for unit in order.units}
        self.here: set[int] = set()  # gathered zero3 units
        self.fresh: set[int] = set()  # refreshed zero1 and zero2 units
        self.last_reader = {ref.name: call.number for call in order.calls for ref in call.reads if ref.kind == "value"}
        self.completes = self._completions()
        self.uses = self._sequence(backward)
        self.positions: dict[int, list[int]] = defaultdict(list)  # unit -> positions of its uses
        for position, use in enumerate(self.uses):
            for unit in use.units:
                self.positions[unit].append(position)

    def _completions(self) -> dict[int, list[int]]:
        """Call -> units whose last gradient its backward gives (backward runs in reverse)."""
        first_giver: dict[int, int] = {}
        for call in reversed(self.order.calls):
            for index in self.order.functions[call.function].gradients:
                if call.reads[index].kind == "parameter":
                    first_giver[self.unit_of[call.reads[index].name]] = call.number
        completes: dict[int, list[int]] = defaultdict(list)
        for unit, call_number in sorted(first_giver.items()):
            completes[call_number].append(unit)
        return completes

    def _sequence(self, backward: bool) -> list[_Use]:
        uses = []
        for mb in range(self.order.micro_batches):
            for call in self.order.calls:
                uses.append(_Use(call, mb, False, self._units(ref.name for ref in call.reads if ref.kind == "parameter")))
            for call in reversed(self.order.calls) if backward else ():
                function = self.order.functions[call.function]
                if function.backward is not None:
                    again = (call.reads[index] for kind, index in function.saved if kind == "read")
                    uses.append(_Use(call, mb, True, self._units(ref.name for ref in again if ref.kind == "parameter")))
        return uses

    def _units(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.unit_of[name] for name in names))

    def write(self) -> tuple[list[Instruction], list[Instruction]]:
        split: int | None = None
        for position, use in enumerate(self.uses):
            if use.backward and split is None:
                split = len(self.out)
            self._use(use, position)
        at = len(self.out) if split is None else split
        return self.out[:at], self.out[at:]

    def _use(self, use: _Use, position: int) -> None:
        self._bring(use)
        following = self.uses[position + 1] if position + 1 < len(self.uses) else None
        # not across the turn from forward to backward: in forward programs the backward is a list of its own
        if self.order.prefetch and following is not None and following.backward == use.backward:
            self._bring(following)
        call = use.call
        op = "BACKWARD" if use.backward else "FORWARD"
        seconds = self.order.price(op, call, use.mb)
        self.out.append(Instruction(op, block=call.number, mb=use.mb, drops=() if use.backward else self._drops(call), seconds=seconds))
        unread = tuple(name for name in call.writes if name not in self.last_reader and name not in self.order.held)
        if unread and not use.backward:
            self.out.append(Instruction("DROP", mb=use.mb, drops=unread))
        self._free(use, position)
        for unit in self.completes.get(call.number, ()) if use.backward else ():
            self._reduce(unit, use.mb)

    def _drops(self, call: Call) -> tuple[str, ...]:
        names = dict.fromkeys(ref.name for ref in call.reads if ref.kind == "value")
        return tuple(name for name in names if self.last_reader[name] == call.number and name not in self.order.held)

    def _bring(self, use: _Use) -> None:
        for unit in use.units:
            size = self.order.bytes_of[unit]
            if self.shard[unit] in ("zero1", "zero2") and unit not in self.fresh:
                self.fresh.add(unit)
                op = "REFRESH"
            elif self.shard[unit] == "zero3" and unit not in self.here:
                self.here.add(unit)
                op = "GATHER"
            else:
                continue
            self.out.append(Instruction(op, unit=unit, stream="gather", bytes=size, seconds=self.order.communication(op, size)))

    def _free(self, use: _Use, position: int) -> None:
        for unit in use.units:
            if unit not in self.here:
                continue
            uses = self.positions[unit]
            at = bisect_right(uses, position)
            later = uses[at] if at < len(uses) else None
            turn = later is not None and self.uses[later].backward and not use.backward
            soon = later == position + 1 and (self.order.joined or self.uses[later].backward == use.backward)
            if later is not None and (soon or (turn and unit in self.order.kept and self.uses[later].mb == use.mb)):
                continue
            self.here.discard(unit)
            self.out.append(Instruction("FREE", unit=unit, bytes=self.order.bytes_of[unit]))

    def _reduce(self, unit: int, mb: int) -> None:
        each = self.shard[unit] in EACH_MICRO_BATCH
        if not each and mb != self.order.micro_batches - 1:
            return
        size = self.order.bytes_of[unit]
        seconds = self.order.communication(f"REDUCE {self.shard[unit]}", size)
        self.out.append(Instruction("REDUCE", unit=unit, mb=mb if each else None, stream="reduce", bytes=size, seconds=seconds))
