"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stageline.running.signature import number_from_json


class StepResult:
    """The loss of the whole batch, and its outputs where they were asked for.

    Args:
        loss: As a tensor, or as the rank that has it has told it.
        outputs: What returns the outputs.
        num_microbatches: How many microbatches the batch gave.

    Attributes:
        num_microbatches: How many microbatches the batch gave.
    """

    def __init__(
        self,
        *,
        loss: Tensor | str,
        outputs: Callable[[], Any] | None,
        num_microbatches: int,
    ) -> None:
        self._loss = loss
        self._outputs = outputs
        self.num_microbatches = num_microbatches

    @cached_property
    def loss(self) -> Tensor:
        """The loss, detached; the same on every rank."""
        if isinstance(self._loss, Tensor):
            return self._loss
        if not torch.is_inference_mode_enabled():
            return number_from_json(self._loss)
        with torch.inference_mode(False):  # whoever asks, and whatever for
            return number_from_json(self._loss)

    @property
    def outputs(self) -> Any:
        """The outputs of the whole batch; None unless made with keep_outputs=True."""
        return None if self._outputs is None else self._outputs()

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss.item():.6g}, num_microbatches={self.num_microbatches})"
