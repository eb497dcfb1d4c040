"""Workers run as if the caller had: its thread-local state is theirs during a step."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl

TRACE: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="nobody")


class Notes(nn.Module):
    """A stage that notes the state it runs in, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward_state: dict[str, Any] = {}
        self.backward_state: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.forward_state = _state()
        out = self.linear(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.backward_state.update(_state()))
        return out  # type: ignore[no-any-return]


def _state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(0).device.type,
        "trace": TRACE.get(),
    }


def build() -> tuple[sl.Pipeline, list[Notes]]:
    stages = [Notes(), Notes()]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    return pipe, stages


def train(pipe: sl.Pipeline) -> None:
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))


def test_autocast_is_on_in_forward_with_its_dtype_and_off_in_backward() -> None:
    pipe, stages = build()
    with torch.autocast("cpu", dtype=torch.float16):
        train(pipe)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    for stage in stages:
        assert stage.forward_state["autocast"]
        assert stage.forward_state["dtype"] is torch.float16
        assert not stage.forward_state["cache"]
        assert stage.backward_state["autocast"] is False
    train(pipe)
    assert not any(stage.forward_state["autocast"] for stage in stages)


def test_no_grad_and_inference_mode() -> None:
    pipe, stages = build()
    with torch.inference_mode():
        out = pipe(torch.randn(4, 4))
        assert all(stage.forward_state["inference"] for stage in stages)
    assert out.is_inference()
    with torch.no_grad():
        pipe(torch.randn(4, 4))
    assert [stage.forward_state["grad"] for stage in stages] == [False, False]
    train(pipe)
    assert [stage.forward_state["grad"] for stage in stages] == [True, True]


def test_the_default_device_and_context_variables() -> None:
    pipe, stages = build()
    token = TRACE.set("me")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.device("meta"):
        pipe.step(x, target=y)
    TRACE.reset(token)
    assert [stage.forward_state["device"] for stage in stages] == ["meta", "meta"]
    assert [stage.forward_state["trace"] for stage in stages] == ["me", "me"]
    pipe.step(x, target=y)
    assert [stage.forward_state["device"] for stage in stages] == ["cpu", "cpu"]


def test_saved_tensor_hooks_see_what_all_stages_save() -> None:
    pipe, _ = build()
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train(pipe)
    inside = len(packed)
    assert inside >= 4  # two stages, two microbatches: each Linear saves its input at least
    train(pipe)
    assert len(packed) == inside


@pytest.mark.parametrize("threads_before", [1, 2])
def test_the_callers_own_state_is_untouched(threads_before: int) -> None:
    pipe, _ = build()
    torch.set_num_threads(threads_before)
    before = _state()
    train(pipe)
    assert _state() == before
    assert torch.get_num_threads() == threads_before
