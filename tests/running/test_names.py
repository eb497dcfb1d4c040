"""All names of a tensor, in the process that holds it and in the others."""

from __future__ import annotations

from torch import nn

from stageline.partitioning.sharing import Shared, find_shared
from stageline.partitioning.sources import StageSource
from stageline.running.names import Names, all_names


def stages() -> tuple[list[StageSource], list[Shared]]:
    """Stages 0 and 2 share a weight; stage 1 has its own."""
    head = nn.Linear(2, 2, bias=False)
    modules = [head, nn.Linear(2, 2), head]
    sources = [StageSource(module, (), f"{index}.") for index, module in enumerate(modules)]
    shared, _ = find_shared([(i, f"{i}.", module) for i, module in enumerate(modules)])
    return sources, shared


def test_one_process_has_all_names() -> None:
    assert all_names(*stages(), [0, 1, 2]) == Names(
        {"2.weight": "0.weight"}, {"0.weight": "0.weight"}
    )


def test_a_later_holder_knows_the_first_name() -> None:
    assert all_names(*stages(), [2]) == Names({"0.weight": "2.weight"}, {"2.weight": "0.weight"})


def test_a_process_that_does_not_hold_it_has_none_of_the_names() -> None:
    assert all_names(*stages(), [1]) == Names()


def test_names_that_no_stage_uses_go_where_the_tensor_is() -> None:
    given = {"wte.weight": "0.weight", "norm.bias": "1.bias"}
    assert all_names(*stages(), [2], given) == Names(
        {"0.weight": "2.weight", "wte.weight": "2.weight"},
        {"2.weight": "0.weight"},
        frozenset({"norm.bias"}),
    )
