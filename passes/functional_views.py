"""Single assignment for tensors that share memory: a write through one of them is replayed on all.

Values of the traced graph are named by their old nodes. Old nodes that share a storage form a tree: the root owns it, the others are views.
A write to a node gives it a new functional value, which is scattered into its parent's, and so on to the root; the root's version grows.
A view that is read at an older version is made again from its parent.
"""

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from partitioner.errors import CaptureError
from partitioner.passes.functional_builder import Builder, aten, first_value
from partitioner.passes.functional_schema import bind, source_of

# Ops whose result may lie in its argument's storage in the fake world but is a value of its own in eager.
_FRESH = frozenset((aten.lift_fresh_copy.default, aten.clone.default, aten._to_copy.default))
_SAME_ELEMENTS = frozenset(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.alias.default,
        aten.detach.default,
        aten.detach_.default,
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.unsqueeze_.default,
        aten.contiguous.default,
        aten.lift_fresh.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
        aten.ravel.default,
        aten.atleast_1d.default,
        aten.atleast_2d.default,
    )
)
_DETACHING = frozenset((aten.detach.default, aten.detach_.default))
_TRANSPOSES = frozenset(
    (aten.transpose.int, aten.swapdims.default, aten.swapaxes.default, aten.transpose_.default, aten.swapdims_.default, aten.swapaxes_.default)
)
_TURNS = frozenset((aten.t.default, aten.t_.default, aten.numpy_T.default, aten.mT.default))


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


class Values:
    """The functional value of every old node."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.same: dict[fx.Node, fx.Node] = {}  # an old node that is another one: a body's placeholder, the result of an in-place op
        self.versions: dict[fx.Node, int] = {}
        self._values: dict[fx.Node, tuple[fx.Node, int]] = {}
        self._parents: dict[fx.Node, fx.Node | None] = {}

    def resolve(self, old: fx.Node) -> fx.Node:
        while old in self.same:
            old = self.same[old]
        return old

    def define(self, old: fx.Node, new: fx.Node) -> None:
        self._values[old] = (new, self.versions.get(self.root(old), 0) if self.versions else 0)

    def parent(self, old: fx.Node) -> fx.Node | None:
        """The old node that this one is a view of."""
        if old not in self._parents:
            found = None
            storage = _storage(first_value(old))
            source = self.resolve(old.args[0]) if old.op == "call_function" and old.target is operator.getitem else old  # type: ignore[arg-type]
            if storage is not None and source.op == "call_function" and source.target not in _FRESH:
                inputs = (self.resolve(i) for i in source.all_input_nodes)
                found = next((i for i in inputs if i is not old and _storage(first_value(i)) == storage), None)
            self._parents[old] = found
        return self._parents[old]

    def root(self, old: fx.Node) -> fx.Node:
        while (parent := self.parent(old)) is not None:
            old = parent
        return old

    def written(self, old: fx.Node) -> bool:
        return self.versions.get(self.root(self.resolve(old)), 0) > 0

    def value(self, old: fx.Node) -> fx.Node:
        """The present value, whatever the gradient mode."""
        old = self.resolve(old)
        if old not in self._values:
            raise CaptureError(f"{old.target} ({where(old)}) has no functional form and its result is used")
        new, version = self._values[old]
        if not self.versions:
            return new
        now = self.versions.get(self.root(old), 0)
        if version != now:
            parent = self.parent(old)
            if parent is None:
                raise CaptureError(f"the value of {old} was lost after a write")  # a root is always written at its newest version
            new = self._again(old, parent)
            self._values[old] = (new, now)
        return new

    def read(self, old: fx.Node) -> fx.Node:
        """The present value as an op reads it in the present gradient mode."""
        return self.builder.read(self.value(old))

    def args(self, args: Any) -> Any:
        return map_arg(args, self.read)

    def _again(self, old: fx.Node, parent: fx.Node) -> fx.Node:
        base = self.value(parent)
        if old.target is operator.getitem:
            many = self.resolve(old.args[0])  # type: ignore[arg-type]
            made = self._view(many, parent, base)
            return self.builder.emit(operator.getitem, made, old.args[1])
        return self._view(old, parent, base)

    def _view(self, old: fx.Node, parent: fx.Node, base: fx.Node) -> fx.Node:
        simple = plain_view(self.builder, old, base)
        if simple is not None:
            return simple

        def swap(node: fx.Node) -> fx.Node:
            return base if self.resolve(node) is parent else self.value(node)

        target: Any = old.target
        if torch.Tag.inplace_view in getattr(target, "tags", ()):
            target = getattr(getattr(aten, target._schema.name.split("::")[1][:-1]), target._overloadname)
        return self.builder.emit(target, *map_arg(old.args, swap), **map_arg(old.kwargs, swap))

    def write(self, old: fx.Node, new: fx.Node) -> None:
        """Let `new` be the value that an in-place op left in `old`."""
        builder, old = self.builder, self.resolve(old)
        example = first_value(old)
        new = builder.expand(builder.cast(new, example.dtype), example.shape)
        root = self.root(old)
        carries = root.op != "placeholder" and builder.tracked(self.value(root))  # a written parameter is refused by name in any case
        chain, node = [(old, new)], old
        while (parent := self.parent(node)) is not None:
            if carries and node.target in _DETACHING:
                _refuse_hidden_write(old, "through .detach() or .data")
            new = scatter(builder, node, self.resolve(node.args[0]), self.value(parent), new)  # type: ignore[arg-type]
            node = parent
            chain.append((node, new))
        if carries and not builder.grad:
            _refuse_hidden_write(old, "under torch.no_grad()")
        self.versions[root] = self.versions.get(root, 0) + 1
        for node, value in chain:
            self._values[node] = (value, self.versions[root])


def _refuse_hidden_write(old: fx.Node, how: str) -> NoReturn:
    raise CaptureError(
        f"{where(old)}: a value that carries a gradient is changed in place {how}. Eager keeps the gradient of the old value for the new one, "
        "which no graph can express. Compute a new tensor instead, for example x = x + (new - x).detach()."
    )


def _refuse_unknown_view(old: fx.Node) -> NoReturn:
    raise CaptureError(f"{where(old)}: a view made by {old.target} is changed in place, and how it lies in its base is not known. Clone it first.")


def where(old: fx.Node) -> str:
    """The user's source line of an old node, for messages."""
    return source_of(old) or str(old)


def plain_view(builder: Builder, old: fx.Node, base: fx.Node) -> fx.Node | None:
    """Views in the few forms that later passes know; None where the op is kept as it is."""
    target, example = old.target, first_value(old)
    if target in (aten.view.default, aten._unsafe_view.default):
        return builder.emit(aten.reshape.default, base, old.args[1])
    if target in (aten.view_as.default, aten.reshape_as.default):
        return builder.emit(aten.reshape.default, base, list(example.shape))
    if target is aten.expand_as.default:
        return builder.emit(aten.expand.default, base, list(example.shape))
    if target in (aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default):
        return base
    if target in _DETACHING:
        return builder.detached(base)
    if target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default, aten._to_copy.default):
        return _convert(builder, old, base, example)
    if target is aten.contiguous.default or (target is aten.clone.default and old.kwargs.get("memory_format") is None):
        given = first_value(base)
        if given.stride() == example.stride():
            return base
        if target is aten.clone.default:
            return None
        return builder.emit(aten.clone.default, base, memory_format=bind(old)["memory_format"])
    return None


def _convert(builder: Builder, old: fx.Node, base: fx.Node, example: Tensor) -> fx.Node:
    given = first_value(base)
    changes: dict[str, Any] = {}
    if given.dtype != example.dtype:
        changes["dtype"] = example.dtype
    if given.device != example.device:
        changes["device"] = example.device
    if given.stride() != example.stride() and bind(old).get("memory_format") not in (None, torch.preserve_format):
        changes["memory_format"] = bind(old)["memory_format"]
    return builder.emit(aten._to_copy.default, base, **changes) if changes else base


def scatter(builder: Builder, old: fx.Node, source: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    """The inverse of a view: `base` with the elements that view `old` shows replaced by `value`."""
    target, shape, seen = old.target, first_value(base).shape, first_value(old)
    if target is operator.getitem:
        index: Any = old.args[1]
        return _scatter_piece(builder, source, index, base, value)
    if target in _SAME_ELEMENTS or (target in (aten.expand.default, aten.expand_as.default) and seen.shape == shape):
        return value if first_value(value).shape == shape else builder.emit(aten.reshape.default, value, list(shape))
    given = bind(old)
    if target in _TRANSPOSES:
        return builder.emit(aten.transpose.int, value, *list(given.values())[1:3])
    if target in _TURNS:
        dims = list(range(len(shape)))
        dims = [*dims[:-2], *reversed(dims[-2:])] if target is aten.mT.default else dims[::-1]
        return builder.emit(aten.permute.default, value, dims)
    if target is aten.permute.default:
        dims = [d % len(shape) for d in given["dims"]]
        return builder.emit(aten.permute.default, value, [dims.index(d) for d in range(len(shape))])
    if target in (aten.movedim.intlist, aten.movedim.int, aten.moveaxis.intlist, aten.moveaxis.int):
        return builder.emit(target, value, given["destination"], given["source"])
    if target is aten.slice.Tensor:
        return builder.emit(aten.slice_scatter.default, base, value, given["dim"], given["start"], given["end"], given["step"])
    if target is aten.narrow.default:
        start = given["start"] + (shape[given["dim"]] if given["start"] < 0 else 0)
        return builder.emit(aten.slice_scatter.default, base, value, given["dim"], start, start + given["length"])
    if target is aten.select.int:
        return builder.emit(aten.select_scatter.default, base, value, given["dim"], given["index"])
    if target is aten.diagonal.default:
        return builder.emit(aten.diagonal_scatter.default, base, value, given["offset"], given["dim1"], given["dim2"])
    if target is aten.view.dtype:
        return builder.emit(aten.view.dtype, value, first_value(base).dtype)
    if target is aten.view_as_real.default:
        return builder.emit(aten.view_as_complex.default, value)
    if target is aten.view_as_complex.default:
        return builder.emit(aten.view_as_real.default, value)
    if target in (aten.real.default, aten.imag.default):
        parts = builder.emit(aten.view_as_real.default, base)
        parts = builder.emit(aten.select_scatter.default, parts, value, len(shape), int(target is aten.imag.default))
        return builder.emit(aten.view_as_complex.default, parts)
    parent = first_value(source)
    if parent.is_contiguous() and parent.storage_offset() == 0:
        whole = builder.emit(aten.clone.default, base, memory_format=torch.contiguous_format)
        return builder.emit(aten.as_strided_scatter.default, whole, value, list(seen.shape), list(seen.stride()), seen.storage_offset())
    _refuse_unknown_view(old)


def _scatter_piece(builder: Builder, many: fx.Node, index: int, base: fx.Node, value: fx.Node) -> fx.Node:
    """The index-th piece of unbind, split, chunk and their like, put back."""
    given, pieces, shape = bind(many), first_value(many), first_value(base).shape
    name = many.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if name not in ("unbind", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"):
        _refuse_unknown_view(many)
    dim = given.get("dim", 0) % len(shape)
    if name == "unbind":
        return builder.emit(aten.select_scatter.default, base, value, dim, index)
    start = sum(piece.shape[dim] for piece in pieces[:index])
    return builder.emit(aten.slice_scatter.default, base, value, dim, start, start + pieces[index].shape[dim])
