"""Where a call meets the graph of its caller: its batch, and the gradients of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stageline.errors import BatchError, PipeError
from stageline.running.boundary import Packet
from stageline.running.microbatches import Microbatches
from stageline.running.state import StepState
from stageline.torch_private import run_backward


@dataclass(frozen=True)
class DifferentiableRun:
    """The outputs of all microbatches, and what takes their gradients back through the pipeline.

    Attributes:
        packets: The output of each microbatch.
        inputs: The arguments of the model that require a gradient.
        sizes: The rows of each microbatch.
        backward: Takes the gradients of the outputs, returns those of the inputs.
    """

    packets: list[Packet]
    inputs: list[Tensor]
    sizes: list[int]
    backward: Callable[[Sequence[Sequence[Tensor | None]]], list[Tensor | None]]


class Unchanged:
    """Whether a batch is as it was when a call took it: its backward needs the same numbers."""

    def __init__(self, batch: Microbatches) -> None:
        self._seen = [(leaf, _version(leaf)) for leaf in batch.tensors()]

    def check(self) -> None:
        """Raise if a tensor of the batch was written to."""
        if any(_version(leaf) != version for leaf, version in self._seen):
            raise PipeError(
                "the batch was modified in place between the call and its backward, which "
                "needs it as it was: pass a copy, or change it later"
            )


def accumulate_inputs(first: StepState) -> None:
    """Give the arguments of the model their gradients, as ``loss.backward()`` would."""
    gradients = input_gradients(first)
    if not gradients:
        return
    wanting = [leaf for leaf in first.microbatches.input_tensors() if leaf.requires_grad]
    pairs = [
        (leaf, gradient)
        for leaf, gradient in zip(wanting, gradients, strict=True)
        if gradient is not None
    ]
    if pairs:
        run_backward(*zip(*pairs, strict=True))


def refuse_history(batch: Microbatches) -> None:
    """Each microbatch has its own backward; only one could walk a graph behind the batch."""
    for leaf in batch.tensors():
        if leaf.grad_fn is not None:
            raise BatchError(
                f"an argument of step has a graph behind it ({leaf.grad_fn.name()}), which a step "
                "would not train: pass it detached, or use out = pipe(x) and differentiate that"
            )


def input_gradients(state: StepState) -> list[Tensor | None]:
    """Return the gradients of the model's arguments that require one."""
    per_microbatch = [state.input_gradients.pop(i) for i in sorted(state.input_gradients)]
    return state.microbatches.join_gradients(per_microbatch) if per_microbatch else []


def _version(leaf: Tensor) -> int:
    return 0 if leaf.is_inference() else leaf._version
