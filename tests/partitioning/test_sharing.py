"""Tensors that two stages hold: found by their memory, whatever they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stageline.partitioning.sharing import find_shared


class Holder(nn.Module):
    """Holds a tensor as a buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", tensor)


def test_stages_of_their_own_share_nothing() -> None:
    assert find_shared([(0, nn.Linear(2, 2)), (1, nn.Linear(2, 2))]) == []


def test_one_module_twice_in_one_stage_is_fine() -> None:
    layer = nn.Linear(2, 2)
    assert find_shared([(0, nn.Sequential(layer, nn.ReLU(), layer)), (1, nn.ReLU())]) == []


def test_a_tied_weight_is_named_on_both_sides() -> None:
    first, last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    last.weight = first.weight
    assert find_shared([(0, nn.Sequential(first)), (1, nn.ReLU()), (2, last)]) == [
        "weight of 5 x 3 is held by stage 0 as 0.weight and by stage 2 as weight: "
        "put both into one stage"
    ]


def test_two_parameters_over_one_tensor_are_tied() -> None:
    """As in Varuna's document: the Parameters differ, the memory does not."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = nn.Parameter(first.weight.detach())
    assert last.weight is not first.weight
    assert len(find_shared([(0, first), (1, last)])) == 1


def test_a_view_of_a_weight_is_the_weight() -> None:
    first, last = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)
    last.weight = nn.Parameter(first.weight.detach().t())
    assert len(find_shared([(0, first), (1, last)])) == 1


def test_a_slice_of_a_weight_is_tied_to_it() -> None:
    """It begins at another address, but a step of the one changes the other."""
    first, last = nn.Linear(3, 4, bias=False), nn.Linear(3, 2, bias=False)
    last.weight = nn.Parameter(first.weight.detach()[1:3])
    assert len(find_shared([(0, first), (1, last)])) == 1


def test_a_batchnorm_in_two_stages_shares_its_statistics_too() -> None:
    norm = nn.BatchNorm1d(4)
    shared = " ".join(find_shared([(0, nn.Sequential(norm)), (1, nn.Sequential(norm))]))
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert f"stage 0 as 0.{name} and by stage 1 as 0.{name}" in shared


def test_a_tensor_in_three_stages_is_one_finding() -> None:
    layer = nn.Linear(2, 2, bias=False)
    (finding,) = find_shared([(index, layer) for index in range(3)])
    assert "stage 0 as weight and by stage 1 as weight and by stage 2 as weight" in finding


def test_meta_and_empty_tensors_are_not_taken_for_each_other() -> None:
    with torch.device("meta"):
        stages = [(index, nn.Linear(2, 2)) for index in range(2)]
    assert find_shared(stages) == []
    assert find_shared([(index, Holder(torch.empty(0))) for index in range(2)]) == []


def test_a_tied_weight_on_meta_is_found() -> None:
    layer = nn.Linear(2, 2, bias=False, device="meta")
    assert len(find_shared([(0, layer), (1, layer)])) == 1


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_has_no_storage_to_share() -> None:
    """An adjacency matrix: asking it for its storage raises NotImplementedError."""
    adjacency = torch.eye(3).to_sparse()
    assert find_shared([(0, Holder(adjacency)), (1, nn.Linear(2, 2))]) == []


def test_neighbours_in_one_flat_vector_are_not_tied() -> None:
    """``vector_to_parameters`` lays all parameters side by side in one storage; none overlap."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*first.parameters(), *last.parameters()]
    flat = nn.utils.parameters_to_vector(parameters).detach().clone()
    nn.utils.vector_to_parameters(flat, parameters)
    assert find_shared([(0, first), (1, last)]) == []
