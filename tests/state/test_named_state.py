"""Copies of state in host memory, which an asynchronous save writes while training goes on."""

import weakref

import torch
from common import no_garbage_collection
from tensor_subclasses import RowScaled, TravelsLow
from torch import Tensor, nn

from shardwise.state.named_state import memory_of, staged


def test_tensors_of_a_class_are_told_apart_by_the_tensors_inside() -> None:
    ones, zeros = TravelsLow(torch.ones(3, 2)), TravelsLow(torch.zeros(3, 2))
    scaled = RowScaled.of(torch.arange(6.0).view(3, 2))
    state = {"ones": ones, "inside": [zeros, ones.detach()], "scaled": scaled}
    copies = staged(state)
    for tensor in (*ones.parts, *zeros.parts, *scaled.parts):
        tensor.fill_(7)
    assert torch.equal(copies["ones"].values(), torch.ones(3, 2))
    assert torch.equal(copies["inside"][0].values(), torch.zeros(3, 2))
    torch.testing.assert_close(copies["scaled"].values(), torch.arange(6.0).view(3, 2), rtol=0.02, atol=0.0)
    assert copies["inside"][1] is copies["ones"]


def test_one_memory_is_copied_once_for_each_way_to_see_it() -> None:
    weight = nn.Parameter(torch.arange(6.0))
    views: list[Tensor] = [weight, weight.detach(), weight[:3].detach(), weight.view(2, 3).detach()]
    copies = staged(views)
    assert copies[0] is copies[1]
    assert [copy.tolist() for copy in copies] == [view.tolist() for view in views]
    on_meta = [torch.empty(2, device="meta") for _ in range(2)]
    assert memory_of(on_meta[0]) == memory_of(on_meta[0].detach()) != memory_of(on_meta[1])
    empty = staged([torch.empty(0), torch.empty(0)])
    assert empty[0] is not empty[1]


def test_a_subclass_over_a_tensor_is_not_taken_for_it() -> None:
    inside = torch.ones(3, 2)
    copies = staged([inside, TravelsLow(inside, dtype=inside.dtype)])
    assert [type(copy) for copy in copies] == [Tensor, TravelsLow]


def test_copies_are_freed_without_the_garbage_collector() -> None:
    with no_garbage_collection():
        copies = staged({"inside": [torch.ones(3)]})
        freed = weakref.ref(copies["inside"][0])
        del copies
        assert freed() is None
