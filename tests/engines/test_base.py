"""The seal: no tensor keeps a graph, however nested, and what needs no change stays the same object."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ebbtide.engines.base import seal


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass(frozen=True)
class Box:
    inside: Any
    label: str = "x"


def live() -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for item in value.values() for found in tensors(item)]
    if isinstance(value, list | tuple):
        return [found for item in value for found in tensors(item)]
    return tensors(value.inside) if isinstance(value, Box) else []


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: [t],
        lambda t: (t, 1),
        lambda t: {"a": t},
        lambda t: Pair(torch.zeros(1), t),
        lambda t: Box(t),
        lambda t: {"a": [Box((t, None))]},
        lambda t: Box({"a": Pair(t, [t])}),
        lambda t: OrderedDict(a=t),
    ],
    ids=["tensor", "list", "tuple", "dict", "named tuple", "dataclass", "three deep", "four deep", "ordered"],
)
def test_every_structure_is_sealed_in_its_own_type(wrap: Any) -> None:
    value = wrap(live())
    sealed = seal(value)
    assert type(sealed) is type(value)
    found, expected = tensors(sealed), tensors(value)
    assert len(found) == len(expected)
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in found)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], {"a": (torch.ones(1), 3)}, Box([1]), 4, None])
def test_what_needs_no_change_is_the_same_object(value: Any) -> None:
    assert seal(value) is value


def test_a_leaf_that_requires_grad_is_sealed_too() -> None:
    leaf = torch.ones(2, requires_grad=True)
    sealed = seal(leaf)
    assert sealed is not leaf
    assert not sealed.requires_grad
    assert leaf.requires_grad


def test_a_part_of_a_larger_storage_does_not_keep_the_rest() -> None:
    whole = torch.ones(1000, requires_grad=True) * 2
    sealed = seal(whole[:2])
    assert sealed.untyped_storage().nbytes() == 8
    assert seal(whole).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "a whole one is not copied"


def test_a_mapping_with_a_default_keeps_it() -> None:
    value: defaultdict[str, Any] = defaultdict(list)
    value["a"] = live()
    sealed = seal(value)
    assert isinstance(sealed, defaultdict)
    assert sealed.default_factory is list
    assert not sealed["a"].requires_grad
    assert value["a"].requires_grad, "the value given is left as it was"


def test_a_jagged_tensor_is_sealed() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True) * 2
    sealed = seal({"a": jagged})["a"]
    assert not sealed.requires_grad
    assert sealed.layout == torch.jagged
    assert [part.tolist() for part in sealed.unbind()] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
