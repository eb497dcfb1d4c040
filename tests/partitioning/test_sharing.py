"""Tensors that two stages hold: found by their memory, whatever they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stageline.partitioning.sharing import Shared, find_shared


class Holder(nn.Module):
    """Holds a tensor as a buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", tensor)


def find(*stages: nn.Module) -> tuple[list[Shared], list[str]]:
    return find_shared([(index, f"{index}.", module) for index, module in enumerate(stages)])


def ties(*stages: nn.Module) -> list[list[str]]:
    """The names of everything that is tied; nothing may be wrong with it."""
    shared, faults = find(*stages)
    assert faults == []
    return [[holder.name for holder in one.holders] for one in shared]


def fault(*stages: nn.Module) -> str:
    """The only finding."""
    _, (finding,) = find(*stages)
    return finding


def test_stages_of_their_own_share_nothing() -> None:
    assert ties(nn.Linear(2, 2), nn.Linear(2, 2)) == []


def test_one_module_twice_in_one_stage_is_not_tied() -> None:
    layer = nn.Linear(2, 2)
    assert ties(nn.Sequential(layer, nn.ReLU(), layer), nn.ReLU()) == []


def test_a_tied_weight_is_named_on_both_sides() -> None:
    first, last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    last.weight = first.weight
    stages = (nn.Sequential(first), nn.ReLU(), last)
    assert ties(*stages) == [["0.0.weight", "2.weight"]]
    ((tie,), _) = find(*stages)
    assert tie.stages == (0, 2)
    assert tie.is_parameter


def test_two_parameters_over_one_tensor_are_tied() -> None:
    """As in Varuna's document: the Parameters differ, the memory does not."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = nn.Parameter(first.weight.detach())
    assert last.weight is not first.weight
    assert ties(first, last) == [["0.weight", "1.weight"]]


def test_all_names_are_found_in_the_order_of_the_model() -> None:
    layer = nn.Linear(2, 2, bias=False)
    twice = nn.Sequential(layer, layer)
    assert ties(nn.ReLU(), twice, layer) == [["1.0.weight", "1.1.weight", "2.weight"]]


def test_a_transposed_weight_is_refused() -> None:
    first, last = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)
    last.weight = nn.Parameter(first.weight.detach().t())
    assert fault(first, last) == (
        "weight of 4 x 3 is held by stage 0 as 0.weight and by stage 1 as 1.weight, but these are "
        "different views of one memory: put both into one stage, or let both use the same Parameter"
    )


def test_a_slice_of_a_weight_is_refused() -> None:
    """It begins at another address, but a step of the one changes the other."""
    first, last = nn.Linear(3, 4, bias=False), nn.Linear(3, 2, bias=False)
    last.weight = nn.Parameter(first.weight.detach()[1:3])
    assert "different views of one memory" in fault(first, last)


def test_the_same_memory_in_another_dtype_is_refused() -> None:
    first, last = Holder(torch.zeros(4)), nn.Module()
    last.register_buffer("kept", first.kept.view(torch.int32))  # type: ignore[operator]  # a buffer
    assert "different views of one memory" in fault(first, last)


def test_a_parameter_that_is_a_buffer_elsewhere_is_refused() -> None:
    first = nn.Linear(3, 3)
    assert "here as a parameter and there as a buffer" in fault(
        first, Holder(first.weight.detach())
    )


def test_two_parameters_of_which_one_is_frozen_are_refused() -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = nn.Parameter(first.weight.detach(), requires_grad=False)
    assert fault(first, last).endswith("requires a gradient: freeze both or neither")


def test_a_batchnorm_that_two_stages_train_is_refused_by_name() -> None:
    norm = nn.BatchNorm1d(4)
    assert fault(nn.Sequential(norm), nn.Sequential(norm)).startswith(
        "BatchNorm1d is trained by two stages (running_mean of 4 is held by stage 0 as "
        "0.0.running_mean and by stage 1 as 1.0.running_mean)"
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_batchnorm_that_keeps_no_statistics_is_only_tied(kept: bool) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=kept).eval()
    names = ["weight", "bias"]
    names += ["running_mean", "running_var", "num_batches_tracked"] if kept else []
    assert ties(norm, norm) == [[f"0.{name}", f"1.{name}"] for name in names]


def test_a_tensor_in_three_stages_is_one_tie() -> None:
    layer = nn.Linear(2, 2, bias=False)
    assert ties(layer, layer, layer) == [["0.weight", "1.weight", "2.weight"]]


def test_meta_and_empty_tensors_are_not_taken_for_each_other() -> None:
    with torch.device("meta"):
        stages = [nn.Linear(2, 2) for _ in range(2)]
    assert ties(*stages) == []
    assert ties(*(Holder(torch.empty(0)) for _ in range(2))) == []


def test_a_tied_weight_on_meta_is_found() -> None:
    layer = nn.Linear(2, 2, bias=False, device="meta")
    assert len(ties(layer, layer)) == 1


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_is_known_by_its_identity() -> None:
    """An adjacency matrix: asking it for its storage raises NotImplementedError."""
    adjacency = torch.eye(3).to_sparse()
    assert ties(Holder(adjacency), nn.Linear(2, 2)) == []
    assert ties(Holder(adjacency), Holder(adjacency)) == [["0.kept", "1.kept"]]


def test_neighbours_in_one_flat_vector_are_not_tied() -> None:
    """``vector_to_parameters`` lays all parameters side by side in one storage; none overlap."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*first.parameters(), *last.parameters()]
    flat = nn.utils.parameters_to_vector(parameters).detach().clone()
    nn.utils.vector_to_parameters(flat, parameters)
    assert ties(first, last) == []
