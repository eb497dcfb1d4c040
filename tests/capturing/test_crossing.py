"""What crosses a cut: activations, and nothing that a stage can compute for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from tests.exactness.recorded_cases import CASES, Layer

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, WIDTH = 3, 24, 16


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=WIDTH, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=50,
    )
    return transformers.LlamaForCausalLM(config)


def _sent(plan: sl.Plan, inputs: dict[str, Any]) -> list[list[Tensor]]:
    """Run the stages and return the tensors that each hands to the next."""
    sent = []
    variant, leaves = plan.parts.choose((), inputs)
    value: Any = None
    for _, stage in sorted(plan.parts.held.items())[:-1]:
        value = stage(value, leaves, variant)
        parts = [value] if isinstance(value, Tensor) else value
        sent.append([part for part in parts if isinstance(part, Tensor)])
    return sent


@pytest.mark.parametrize("make", [_gpt2, _llama], ids=["GPT-2", "Llama"])
def test_a_padded_mask_is_computed_anew_and_only_hidden_states_travel(make: Any) -> None:
    ids = torch.randint(50, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    plan = sl.partition(sl.capture(make(), (), inputs), split=4)
    hidden = ROWS * LENGTH * WIDTH * 4
    for tensors in _sent(plan, inputs):
        sizes = sorted((t.numel() * t.element_size() for t in tensors), reverse=True)
        assert sizes[0] == hidden
        # The rotary tables of Llama travel beside it: one row of length x head each.
        assert sum(sizes[1:]) <= 2 * LENGTH * WIDTH * 4
        assert all(tensor.numel() < ROWS * LENGTH * LENGTH for tensor in tensors)
    for stage in plan.stages[1:]:
        assert sum(crossing.num_bytes for crossing in stage.receives) < 2 * hidden


def test_sizes_and_masks_of_inputs_do_not_travel() -> None:
    case = CASES["late inputs"]
    inputs, _ = case.batch(4)
    plan = sl.partition(sl.capture(case.model(), (), inputs), split=3)
    for tensors in _sent(plan, inputs):
        assert [tuple(tensor.shape) for tensor in tensors] == [(4, 8)]


class Masked(nn.Module):
    """A mask that is filled in place before use, and used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], x.shape[1], x.shape[1])
        for row in range(2):
            mask[row, :, row:] = 1.0
        mask *= (torch.arange(x.shape[1]) < lengths[:, None])[:, None, :]
        for layer in self.layers:
            x = layer(mask @ x)
        return x


def test_a_mask_that_is_filled_in_place_is_filled_again_where_it_is_used() -> None:
    model = Masked()
    x, lengths = torch.randn(2, 6, 8), torch.tensor([6, 4])
    plan = sl.partition(sl.capture(model, (x, lengths)), split=3)
    for stage in plan.stages[1:]:
        assert [crossing.text for crossing in stage.receives] == ["float32 [2, 6, 8]"]
    other = torch.randn(2, 9, 8), torch.tensor([9, 1])
    assert torch.equal(plan.run(*other), model(*other))
