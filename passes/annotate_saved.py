"""What an op keeps for its backward, as autograd itself says, at any sizes.

Each kind of op is run once on fake tensors with autograd's saved-tensor hooks, every free atom set to a prime of its own that divides no other size
of the graph. Autograd then names the arguments and results that it keeps. What it keeps besides has a number of bytes whose prime factors tell the
atoms it is the product of (the log-softmax inside a cross-entropy), or that is a multiple of a result (the indices of a max-pool); a second run at
other primes confirms that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from partitioner.passes.dims import Dims, Shape
from partitioner.passes.recurrent import opaque
from partitioner.passes.rules import localise

Private = tuple[int, tuple[int, ...]]
"""A number of bytes: a factor and the atoms it is multiplied by."""


@dataclass(frozen=True)
class Kept:
    """Positions in node.all_input_nodes, indices of results, and what is kept besides.

    `certain` is False where that is known at the captured sizes only.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    private: tuple[Private, ...]
    certain: bool = True


class Keeping:
    """Asks autograd, once per kind of op."""

    def __init__(self, dims: Dims, free: Sequence[int], numbers: dict[fx.Node, Any]) -> None:
        """`free`: the atoms whose size may change; `numbers`: values of the scalar nodes (see flow.numbers)."""
        self._dims, self._numbers = dims, numbers
        sizes = {dims.sizes((atom,)) for atom in dims.atoms}
        primes = iter(_primes(2 * len(free), sizes))
        self._first = {atom: next(primes) for atom in free}
        self._second = {atom: next(primes) for atom in free}
        self._known: dict[Any, Kept] = {}

    def of(self, key: Any, node: fx.Node, needs: frozenset[int]) -> Kept:
        """`key`: equal for equal ops; `needs`: positions in node.all_input_nodes that want a gradient."""
        if (key, needs) not in self._known:
            self._known[key, needs] = self._ask(node, needs)
        return self._known[key, needs]

    def _ask(self, node: fx.Node, needs: frozenset[int]) -> Kept:
        captured: dict[int, int] = {}
        try:
            arguments, results, private, made = self._run(node, needs, self._first)
            if not private:
                return Kept(arguments, results, ())
            _, _, again, made_again = self._run(node, needs, self._second)
            told = [self._told(node, *sizes, made, made_again) for sizes in zip(private, again, strict=True)]
            if None not in told:
                return Kept(arguments, results, tuple(one for one in told if one is not None))
        except (RuntimeError, ValueError, IndexError):  # the op's arguments hold for the captured sizes only
            pass
        try:
            arguments, results, private, _ = self._run(node, needs, captured)
        except RuntimeError:  # no fake form: what is differentiated is taken to be read again
            return Kept(tuple(sorted(needs)), (), (), False)
        return Kept(arguments, results, tuple((size, ()) for size in private), not private)

    def _told(self, node: fx.Node, size: int, again: int, made: list[int], made_again: list[int]) -> Private | None:
        """What a number of bytes is the product of, given it in both runs and the elements of the results in both."""
        shapes = [(), *[tuple(atom for dim in shape or () for atom in dim) for shape in self._shapes(node)]]
        for elements, elements_again, atoms in zip([1, *made], [1, *made_again], shapes, strict=True):
            if elements and elements_again and size % elements == 0 and again % elements_again == 0:
                factor, others = _factored(size // elements, self._first)
                if factor * prod(self._second[atom] for atom in others) == again // elements_again:
                    return factor, (*atoms, *others)
        return None

    def _run(self, node: fx.Node, needs: frozenset[int], sizes: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]]:
        """Arguments and results that are kept, bytes of what is kept besides, elements of the results."""
        inputs = node.all_input_nodes
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with FakeTensorMode(), torch.enable_grad():
            env: dict[fx.Node, Any] = dict(self._numbers)
            for position, one in enumerate(inputs):
                if one not in self._numbers:
                    env[one] = self._fake(one, position in needs, sizes)
            shapes = [None if shape is None else self._shape(shape, sizes) for shape in self._shapes(node)]
            args, kwargs = localise(node, node.args, dict(node.kwargs), shapes) if sizes else (node.args, dict(node.kwargs))
            args, kwargs = fx.node.map_arg(args, env.__getitem__), fx.node.map_arg(kwargs, env.__getitem__)
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                out = opaque(node.target, args, kwargs)
                out = node.target(*args, **kwargs) if out is None else out  # type: ignore[operator]
            results = list(out) if isinstance(out, (tuple, list)) else [out]
            places = {_storage(env[one]): at for at, one in enumerate(inputs) if isinstance(env[one], Tensor)}
            made = {_storage(one): at for at, one in enumerate(results) if isinstance(one, Tensor) and _storage(one) not in places}
            found = {_storage(one): one for one in kept}
            private = [int(one.untyped_storage().nbytes()) for key, one in found.items() if key not in places and key not in made]
            return (
                tuple(sorted({places[key] for key in found if key in places})),
                tuple(sorted({made[key] for key in found if key in made})),
                private,
                [one.numel() if isinstance(one, Tensor) else 0 for one in results],
            )

    def _shapes(self, node: fx.Node) -> list[Shape | None]:
        value = node.meta["val"]
        return [self._dims.shape(node, at) for at in range(len(value) if isinstance(value, (tuple, list)) else 1)]

    def _shape(self, shape: Shape, sizes: dict[int, int]) -> list[int]:
        return [_product(atoms, self._dims, sizes) for atoms in shape]

    def _fake(self, node: fx.Node, wants: bool, sizes: dict[int, int]) -> Tensor:
        value, shape = node.meta["val"], self._dims.shape(node)
        size = list(value.shape) if shape is None else self._shape(shape, sizes)
        if list(value.shape) == size:
            return torch.empty_strided(size, value.stride(), dtype=value.dtype, device=value.device, requires_grad=wants)
        order = sorted(range(len(size)), key=lambda dim: -value.stride(dim))  # the same layout, densely
        held = [size[dim] if value.stride(dim) else 1 for dim in order]
        made = torch.empty(held, dtype=value.dtype, device=value.device)
        return made.permute([order.index(dim) for dim in range(len(size))]).expand(size).detach().requires_grad_(wants)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _product(atoms: Sequence[int], dims: Dims, sizes: dict[int, int]) -> int:
    return prod([sizes.get(atom) or dims.sizes((atom,)) for atom in atoms])


def _primes(count: int, sizes: set[int]) -> list[int]:
    """Primes that divide none of the sizes."""
    found: list[int] = []
    prime = 10
    while len(found) < count:
        prime = int(sympy.nextprime(prime))
        if all(size % prime or size == 0 for size in sizes):
            found.append(prime)
    return found


def _factored(size: int, primes: dict[int, int]) -> Private:
    atoms = []
    for atom, prime in primes.items():
        while size and size % prime == 0:
            size //= prime
            atoms.append(atom)
    return size, tuple(atoms)
