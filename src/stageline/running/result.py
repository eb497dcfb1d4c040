"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor


class StepResult:
    """The loss of the whole batch, and its outputs where they were asked for.

    Attributes:
        num_microbatches: How many microbatches the batch gave.
    """

    def __init__(
        self,
        *,
        loss: Callable[[], Tensor | None],
        outputs: Callable[[], Any] | None,
        num_microbatches: int,
    ) -> None:
        self._loss = loss
        self._outputs = outputs
        self.num_microbatches = num_microbatches

    @cached_property
    def loss(self) -> Tensor:
        """The loss, detached; the same on every rank."""
        loss = self._loss()
        assert loss is not None
        return loss

    @property
    def outputs(self) -> Any:
        """The outputs of the whole batch; None unless made with keep_outputs=True."""
        return None if self._outputs is None else self._outputs()

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss.item():.6g}, num_microbatches={self.num_microbatches})"
