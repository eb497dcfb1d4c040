"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stageline.running.signature import number_from_json, number_to_json


@dataclass(frozen=True)
class LossValues:
    """The loss of a batch, and those of its microbatches.

    Attributes:
        total: The loss of the batch.
        each: The losses of all microbatches, as loss_fn returned them.
    """

    total: Tensor
    each: Tensor

    def text(self) -> str:
        """Return both, for other ranks."""
        return f"{number_to_json(self.total)}\n{number_to_json(self.each)}"


class StepResult:
    """The loss of the whole batch, and its outputs where they were asked for.

    Args:
        loss: As tensors, or as the rank that has them has told them.
        outputs: What returns the outputs.
        num_microbatches: How many microbatches the batch gave.

    Attributes:
        num_microbatches: How many microbatches the batch gave.
    """

    def __init__(
        self,
        *,
        loss: LossValues | str,
        outputs: Callable[[], Any] | None,
        num_microbatches: int,
    ) -> None:
        self._loss = loss
        self._outputs = outputs
        self.num_microbatches = num_microbatches

    @cached_property
    def loss(self) -> Tensor:
        """The loss, detached; the same on every rank."""
        return self._loss.total if isinstance(self._loss, LossValues) else _read(self._loss, 0)

    @cached_property
    def microbatch_losses(self) -> list[Tensor]:
        """The loss of each microbatch as loss_fn returned it, not weighed; the same on every rank.

        They are detached.
        """
        each = self._loss.each if isinstance(self._loss, LossValues) else _read(self._loss, 1)
        return list(each.unbind())

    @property
    def outputs(self) -> Any:
        """The outputs of the whole batch; None unless made with keep_outputs=True."""
        return None if self._outputs is None else self._outputs()

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss.item():.6g}, num_microbatches={self.num_microbatches})"


def _read(told: str, line: int) -> Tensor:
    """Return what another rank has told; an ordinary tensor, in whichever mode it is asked for."""
    text = told.split("\n")[line]
    if not torch.is_inference_mode_enabled():
        return number_from_json(text)
    with torch.inference_mode(False):
        return number_from_json(text)
