"""Calls and outputs as leaves with paths, and back."""

import collections
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from partitioner.errors import CaptureError
from partitioner.passes.tree import named_leaves, outputs_of


@dataclass
class Batch:
    dense: list[Tensor]
    scale: float
    extra: Tensor | None = None


def test_leaves_have_paths() -> None:
    tensor = torch.zeros(2)
    leaves, spec = named_leaves((Batch([tensor, tensor], 2.0), {"a": (tensor, None)}), {"b": "text", "a": tensor}, tensor)
    assert [path for path, _ in leaves] == [
        "args[0].dense[0]",
        "args[0].dense[1]",
        "args[0].scale",
        "args[0].extra",
        "args[1]['a'][0]",
        "args[1]['a'][1]",
        "kwargs['a']",
        "kwargs['b']",
        "targets",
    ]
    rebuilt = tree_unflatten([leaf for _, leaf in leaves], spec)
    assert isinstance(rebuilt["args"][0], Batch) and rebuilt["args"][0].dense[0] is tensor
    assert named_leaves((), {"b": 1, "a": 2})[1] == named_leaves((), {"a": 2, "b": 1})[1]
    assert len(named_leaves((), {}, None, has_targets=True)[0]) == 1 and not named_leaves((), {})[0]


def test_outputs_rebuild_the_users_structure() -> None:
    tensor = torch.zeros(2)
    Pair = collections.namedtuple("Pair", "first second")
    cache = type("Cache", (), {})()
    cache.keys = [tensor]
    output = {"x": Pair(tensor, 3), "y": Batch([tensor], 1.5), "cache": cache, "name": "text"}
    found, spec = outputs_of(output)
    assert [path for path, _ in found] == ["output['x'].first", "output['y'].dense[0]"]
    rebuilt = tree_unflatten([torch.ones(1), torch.ones(2)], spec)
    assert rebuilt["x"] == Pair(torch.ones(1), 3) and rebuilt["y"].scale == 1.5 and rebuilt["cache"] is None and rebuilt["name"] == "text"


def test_leaves_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"args\[0\] is a numpy array"):
        named_leaves((np.zeros(3),), {})
    with pytest.raises(CaptureError, match=r"kwargs\['x'\] is no dense tensor"):
        named_leaves((), {"x": torch.eye(2).to_sparse()})
    holder = type("Holder", (), {})()
    holder.tensor = torch.zeros(1)
    with pytest.raises(CaptureError, match=r"args\[0\] is a Holder that holds tensors"):
        named_leaves((holder,), {})
