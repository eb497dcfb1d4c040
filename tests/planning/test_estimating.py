"""Costs of blocks as counted: products, memory and rank order, against torch and measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import stageline as sl
from stageline.partitioning.device import Device
from stageline.planning.abstract import Abstraction

FLOPS_ONLY = Device("counts products", {"float32": 1e9}, bandwidth=1e30)


def uneven() -> nn.Sequential:
    """Layers of which each takes several times as long as the one before."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64 * 4**i), nn.Linear(64 * 4**i, 64)) for i in range(4)]
    return nn.Sequential(*layers)


def test_products_are_those_that_torch_counts() -> None:
    """At a nanosecond each; the forward, the input's half and the weight's half."""
    model, x = uneven(), torch.randn(32, 64)
    costs = sl.estimate_costs(sl.capture(model, (x,)), FLOPS_ONLY)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert sum(block.forward for block in costs.blocks) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    whole = sum(block.forward + block.backward for block in costs.blocks)
    assert whole == counter.get_total_flops()
    inner = costs.blocks[1]
    assert inner.forward == inner.input_gradient == inner.weight_gradient


def test_convolutions_and_attention_are_counted_too() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(nn.Conv2d(2, 4, 3), Attends(), nn.Conv2d(4, 2, 3))
    costs = sl.estimate_costs(sl.capture(model, (torch.randn(3, 2, 8, 8),)), FLOPS_ONLY)
    first, attention, last = costs.blocks
    assert first.forward == 2 * 3 * 4 * 6 * 6 * 2 * 9
    assert attention.forward == 2 * 2 * 3 * 4 * 6 * 6 * 6
    assert attention.weight_gradient == 0 < attention.input_gradient
    assert last.input_gradient == last.weight_gradient == last.forward


def test_memory_is_what_is_measured() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), layer, nn.ReLU(), nn.Linear(32, 8))
    graph = sl.capture(model, (torch.randn(4, 10, 32),))
    counted, measured = sl.estimate_costs(graph), sl.measure_costs(graph, repeats=1)
    for mine, theirs in zip(counted.blocks, measured.blocks, strict=True):
        assert mine.output_bytes == theirs.output_bytes
        assert mine.kept_output_bytes == theirs.kept_output_bytes
        assert mine.parameter_bytes == theirs.parameter_bytes
        kept = theirs.input_bytes + theirs.activation_bytes
        # A bridge keeps its input even where the operation behind it has made a copy of that.
        assert mine.input_bytes + mine.activation_bytes == pytest.approx(kept, rel=0.06, abs=64)
        slack = 0.1 * kept + 64
        assert abs(mine.input_gradient_frees - theirs.input_gradient_frees) <= slack


def test_blocks_rank_as_they_do_when_measured() -> None:
    graph = sl.capture(uneven(), (torch.randn(64, 64),))
    counted = [block.time for block in sl.estimate_costs(graph).blocks]
    costs = sl.measure_costs(graph, busy=1, beside="processes")
    measured = [block.time for block in costs.blocks]
    assert sorted(counted) == counted
    assert sorted(measured) == measured


def test_a_model_on_meta_costs_what_the_real_one_does() -> None:
    x = torch.randn(8, 64)
    with torch.device("meta"):
        abstract = uneven()
    found = sl.estimate_costs(sl.capture(abstract, (x,)), "A100", rows=[8, 2])
    real = sl.estimate_costs(sl.capture(uneven(), (x,)), "A100", rows=[8, 2])
    assert found == real
    assert "from the recording" not in found.origin
    assert all(parameter.is_meta for parameter in abstract.parameters())


def test_nothing_is_allocated_for_a_large_model() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**15) for _ in range(3)))  # 4 GiB each
    costs = sl.estimate_costs(sl.capture(model, (torch.randn(1, 2**15),)), "H100", rows=64)
    assert costs.blocks[1].parameter_bytes == 4 * (2**30 + 2**15)
    assert costs.blocks[1].output_bytes == 64 * 2**15 * 4


class Routed(nn.Module):
    """Decides by its activations, which an estimate does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        made: Tensor = self.inner(x) + chosen.sum()
        return made if bool(made.sum() > 1e9) else made + 1


def test_what_cannot_be_counted_is_taken_from_the_recording() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Routed(), Routed())
    costs = sl.estimate_costs(sl.capture(model, (torch.randn(4, 8),)), FLOPS_ONLY, rows=8)
    assert "from the recording" in costs.origin
    first, second, _ = costs.blocks
    assert first.forward == first.weight_gradient == 2 * 8 * 8 * 8
    assert (first.input_gradient, second.input_gradient) == (0, second.forward)
    assert first.output_bytes == 8 * 8 * 4


def test_a_device_from_a_file_and_a_loss(tmp_path: Any) -> None:
    path = tmp_path / "slow.toml"
    path.write_text("bandwidth = 1e9\noverhead = 1e-6\n[flops]\nfloat32 = 1e9\n")
    graph = sl.capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(4, 8),))
    plain = sl.estimate_costs(graph, str(path))
    lossy = sl.estimate_costs(
        graph, str(path), loss_fn=nn.functional.mse_loss, target=torch.randn(4, 8)
    )
    assert plain.origin == "estimated for slow"
    # One operation: a microsecond to start it, and 544 bytes in and out, more than its arithmetic.
    assert plain.blocks[0].forward == 1000 + 4 * (32 + 64 + 8 + 32)
    assert lossy.blocks[0] == plain.blocks[0]
    assert lossy.blocks[1].forward > plain.blocks[1].forward


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(sl.ConfigError, match=r"wanted what sl\.capture"):
        sl.estimate_costs(nn.Linear(2, 2))  # type: ignore[arg-type]  # no graph
    graph = sl.capture(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(2, 2),))
    with pytest.raises(sl.ConfigError, match="rows='2': wanted a size"):
        sl.estimate_costs(graph, rows="2")  # type: ignore[arg-type]  # no number
    with pytest.raises(sl.ConfigError, match="wanted one of 'cpu'"):
        sl.estimate_costs(graph, "TPU")


def test_a_block_that_works_in_place_on_its_input() -> None:
    value = torch.randn(2, 4).requires_grad_()
    estimate, made = Abstraction(FLOPS_ONLY).run(nn.ReLU(inplace=True), torch.relu_, value)
    assert made.requires_grad
    assert estimate.output_bytes == 32
