"""A verifier of placed graphs: every op's placements are derived again from its named dims, without looking at how they were chosen.

    inputs        where Placed.cuts says; parameters, buffers, constants, prologue values and totals whole
    collectives   all_reduce Partial -> Replicate · all_gather Cut -> Replicate · shard Replicate -> Cut · share Replicate -> Partial,
                  with the dim, the sizes and the rows of that cut; own_mean and addend, with the scalar part, Replicate -> Replicate
    any other op  all whole -> whole, or cut where the op itself makes the rows
                  Partial in arguments in which it is linear, no cut -> Partial
                  one label cut, in every argument that has it, and not whole -> cut where results have it, Partial where they do not
                  without a rule: whole -> whole
    sizes         a size argument is the local size: rows · outer · inner in a cut dim, the captured number elsewhere
    outputs       where Placed.outputs says; the loss Partial, new buffer values whole

One pass over the graph; the rules are looked up, not computed again.
"""

import operator
from collections.abc import KeysView
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from partitioner.errors import PlacementError
from partitioner.passes.dims import Cut
from partitioner.passes.graph import Graph
from partitioner.passes.placement import PARTIAL, REPLICATE, Placed, Where, carried, locate
from partitioner.passes.rules import describe, tensor_arguments
from partitioner.passes.rules.describe import OpDims

_ops = torch.ops.partitioner
_SIZES = ("size", "shape", "sizes", "split_sizes")


def check_placed(placed: Placed) -> None:
    """Raise PlacementError, naming the op, where a placement does not follow from the op and the placements of its arguments."""
    if placed.prologue is not None:
        cuts = tuple(node.meta.get("cut") for node in placed.prologue.placeholders)
        _Check(placed.prologue, cuts, (REPLICATE,) * len(placed.prologue.outputs)).run()
    if placed.epilogue is not None:
        _Check(placed.epilogue, (None,) * len(placed.epilogue.inputs), (REPLICATE,) * len(placed.epilogue.outputs)).run()
    _Check(placed.graph, placed.cuts, placed.outputs).run()


def _fail(node: fx.Node, what: str) -> NoReturn:
    module, source = node.meta.get("module"), node.meta.get("source")
    where = f" of {module}" if module else ""
    raise PlacementError(
        f"{node.name} ({node.target}){where}{f' at {source}' if source else ''} {what}. This is a mistake of the partitioner, not of the model; "
        "please report it. Until then pass batch_dim to cut another dim, or gpus=1"
    )


class _Check:
    def __init__(self, graph: Graph, cuts: tuple[Cut | None, ...], outputs: tuple[Where, ...]) -> None:
        self.graph, self.cuts, self.outputs = graph, cuts, outputs
        self.scalars = {given.name: node for node, given in zip(graph.placeholders, graph.inputs, strict=True) if given.kind == "scalar"}
        self.total: int | None = None
        self._seen: set[tuple[int, ...]] = set()  # legal combinations, by rule and placements, themselves: deep models repeat them

    def run(self) -> None:
        for node, given, cut in zip(self.graph.placeholders, self.graph.inputs, self.cuts, strict=True):
            if given.kind == "scalar":
                continue
            if node.meta.get("placement") != (cut or REPLICATE):
                _fail(node, f"is an input placed {node.meta.get('placement')}, but it is handed over {cut or REPLICATE}")
            if cut is not None and given.kind != "input":
                _fail(node, f"is a {given.kind} and cut; only inputs are")
            if cut is not None:
                self._rows(node, node.meta["val"], cut)
        for node in self.graph.module.graph.nodes:
            if node.op == "call_function":
                self._node(node)
        for node, result, place in zip(self.graph.results, self.graph.outputs, self.outputs, strict=True):
            if _place(node) != place:
                _fail(node, f"is an output placed {_place(node)}, but it is said to be {place}")
            allowed = {"loss": place == PARTIAL, "output": True}.get(result.kind, place == REPLICATE)
            if not allowed:
                _fail(node, f"is the {result.kind} {result.name} and placed {place}")

    def _rows(self, node: fx.Node, value: Any, cut: Cut) -> None:
        """A cut dim has outer · total · inner elements, with the same total everywhere."""
        size, scale = int(value.shape[cut.dim]), cut.outer * cut.inner
        total = size // scale
        self.total = total if self.total is None else self.total
        if total * scale != size or total != self.total:
            _fail(node, f"is cut as {cut} in a dim of {size}, which is not {self.total} rows")

    def _node(self, node: fx.Node) -> None:
        value, places = node.meta.get("val"), node.meta.get("placement")
        if not isinstance(value, (Tensor, tuple, list)):
            return  # arithmetic of scalars
        if places is None:
            _fail(node, "has no placement")
        if node.target is operator.getitem:
            source, index = node.args
            if places != source.meta["placement"][index]:  # type: ignore[union-attr]
                _fail(node, f"is placed {places}, but its source has it {source.meta['placement'][index]}")  # type: ignore[union-attr]
            return
        results = places if isinstance(places, tuple) else (places,)
        for one, place in zip(value if isinstance(value, (tuple, list)) else (value,), results, strict=True):
            if isinstance(place, Cut):
                self._rows(node, one, place)
        if (node.meta.get("cut") if not isinstance(places, tuple) else None) != (places if isinstance(places, Cut) else None):
            _fail(node, f"is placed {places} but says cut {node.meta.get('cut')}")
        if self._collective(node, results[0]):
            return
        arguments = tensor_arguments(node)
        rule = describe(node)
        places = [_place(a) for a in arguments]
        combination = (id(rule), *map(id, places), *map(id, results))
        legal = None if combination in self._seen else self._legal(node, rule, places, results)
        self._seen.add(combination)
        if legal is not None:
            _fail(node, f"turns {', '.join(map(str, map(_place, arguments))) or 'nothing'} into {', '.join(map(str, results))}: {legal}")
        self._sizes(node, value, results)
        self._key(node, results[0])

    def _collective(self, node: fx.Node, place: Where) -> bool:
        """Whether the node is a collective; fails where it does not turn what it gets into what it says."""
        if getattr(node.target, "namespace", None) != "partitioner" or node.target is _ops.random.default:
            return False
        now, args = _place(node.args[0]), node.args  # type: ignore[arg-type]
        if node.target is _ops.all_reduce.default:
            right = now == PARTIAL and place == REPLICATE
        elif node.target is _ops.all_gather.default:
            right = now == Cut(*args[2:5]) and place == REPLICATE and args[5] == self.total  # type: ignore[arg-type]
        elif node.target is _ops.shard.default:
            right = now == REPLICATE and place == Cut(*args[1:4]) and args[4:] == (self.scalars["start"], self.scalars["rows"])  # type: ignore[arg-type]
        elif node.target is _ops.share.default:
            right = now == REPLICATE and place == PARTIAL and args[1] is self.scalars["share"]
        elif node.target in (_ops.own_mean.default, _ops.addend.default):
            right = now == REPLICATE and place == REPLICATE and args[1] is self.scalars["part"]
        else:
            right = False
        if not right:
            _fail(node, f"turns {now} into {place} with {args[1:]}, which it cannot")
        return True

    @staticmethod
    def _legal(node: fx.Node, rule: OpDims | None, places: list[Where], results: tuple[Where, ...]) -> str | None:
        """None where the combination is legal, else why not."""
        if rule is None:
            whole = all(place == REPLICATE for place in (*places, *results))
            return None if whole else "it has no sharding rule, so that all must be whole"
        read = [(place, names) for place, names in zip(places, rule.inputs, strict=True) if names is not None]
        partial = {at for at, (place, names) in enumerate(zip(places, rule.inputs, strict=True)) if place == PARTIAL and names is not None}
        cuts = [(place, names) for place, names in read if isinstance(place, Cut)]
        if partial:
            linear = partial == set(rule.linear) or (len(partial) == 1 and partial <= set(rule.linear_one))
            if cuts or not linear:
                return "it is not linear in its Partial arguments"
            return None if all(place == PARTIAL for place in results) else "a Partial argument makes Partial results"
        made = not cuts  # rows that the op makes itself show in its results alone
        shown = cuts or [(place, names) for place, names in zip(results, rule.outputs, strict=True) if isinstance(place, Cut) and names is not None]
        if not shown:
            return None if all(place == REPLICATE for place in results) else "whole arguments make whole results"
        found = locate(shown[0][0], shown[0][1], rule.sizes)
        if found is None or found[0] in rule.whole:
            return f"the cut falls into {'no label' if found is None else 'a label that no shard may cut'}"
        for place, names in read:
            if place != (carried(found, names, rule.sizes) or REPLICATE):
                return f"an argument is {place} where the cut label makes it {carried(found, names, rule.sizes) or REPLICATE}"
        for place, outs in zip(results, rule.outputs, strict=True):
            derived = REPLICATE if outs is None else carried(found, outs, rule.sizes) or (REPLICATE if made else PARTIAL)
            if place != derived:
                return f"a result is {place} where it must be {derived}"
        return None

    def _sizes(self, node: fx.Node, value: Any, results: tuple[Where, ...]) -> None:
        """Size arguments speak of local sizes."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        names = _argument_names(node.target)
        if names.isdisjoint(_SIZES):
            return
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        name = next((name for name in _SIZES if isinstance(given.get(name), (list, tuple))), None)
        if name is None:
            return
        if isinstance(value, (tuple, list)):
            dim = int(given.get("dim") or 0) % max(value[0].dim(), 1)
            local = [self._local(one, place)[dim] for one, place in zip(value, results, strict=True)]
        else:
            local = self._local(value, results[0])
            if name == "sizes":  # unflatten: the sizes of one dim
                at = int(given["dim"]) % (len(local) - len(given[name]) + 1)
                local = local[at : at + len(given[name])]
        wrong = len(given[name]) != len(local) or any(self._scale(a) != b and a != -1 for a, b in zip(given[name], local, strict=True))
        if wrong:
            _fail(node, f"is given {name} {list(given[name])}, but its result is {', '.join(map(str, results))}")

    def _local(self, value: Tensor, place: Where) -> list[object]:
        """The local shape: numbers, and ("rows", times) in a cut dim."""
        return [("rows", place.outer * place.inner) if isinstance(place, Cut) and place.dim == at else int(s) for at, s in enumerate(value.shape)]

    def _scale(self, size: object) -> object:
        if not isinstance(size, fx.Node):
            return size
        rows = self.scalars.get("rows")
        if size is rows:
            return ("rows", 1)
        return ("rows", size.args[1]) if size.target is operator.mul and size.args[0] is rows else size

    def _key(self, node: fx.Node, place: Where) -> None:
        """Draws that differ between shards are cut, and no others."""
        if node.target is _ops.random.default:
            name = "key_local" if isinstance(place, Cut) else "key_shared"
            if node.args[6] is not self.scalars.get(name):
                _fail(node, f"draws a value placed {place} with {node.args[6]} in place of {name}")


@cache
def _argument_names(target: torch._ops.OpOverload) -> KeysView[str]:
    """In the order of the schema."""
    return dict.fromkeys(argument.name for argument in target._schema.arguments).keys()


def _place(node: fx.Node) -> Where:
    place = node.meta["placement"]
    return place[0] if isinstance(place, tuple) else place  # type: ignore[no-any-return]
