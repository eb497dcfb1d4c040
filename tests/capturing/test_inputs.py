"""The arguments of a call, flat: with a short cut where each is a leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stageline.capturing.inputs import Arguments
from stageline.torch_private import tree_flatten

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "one": ((torch.ones(2),), {}),
    "some of all kinds": ((torch.ones(2), None, 1, 2.5, "a", b"b", True, 1j, ...), {}),
    "by name": ((torch.ones(2),), {"z": 1, "a": nn.Parameter(torch.ones(1))}),
    "by the same names in another order": ((torch.ones(2),), {"a": 1, "z": torch.ones(1)}),
    "only by name": ((), {"x": torch.ones(2), "y": None}),
    "trees": (([torch.ones(2), ()], torch.Size([2])), {"x": {"b": 1, "a": 2}, "y": ((),)}),
    "an object": ((torch.ones(2), torch.device("cpu")), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_flattened_as_torch_does(name: str) -> None:
    args, kwargs = CALLS[name]
    leaves, spec = tree_flatten((args, kwargs))
    for _ in range(2):  # what is known of the first call serves the second
        found = Arguments.of(args, kwargs)
        assert found.spec == spec
        assert all(one is other for one, other in zip(found.leaves, leaves, strict=True))
        assert list(found.unpacked()[1]) == list(kwargs)


def test_calls_that_differ_have_keys_that_differ() -> None:
    keys = [Arguments.of(*call).key() for call in CALLS.values()]
    for index, key in enumerate(keys):
        assert key not in keys[:index]


def test_a_key_tells_one_tensor_given_twice_from_two() -> None:
    x, y = torch.ones(2), torch.ones(2)
    twice, both = Arguments.of((x, 1, x), {}).key(), Arguments.of((x, 1, y), {}).key()
    assert twice != both
    assert both == Arguments.of((y, 2, x), {}).key()
