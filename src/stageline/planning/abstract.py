"""A block run without numbers: tensors have shapes and devices, and nothing is computed.

Parameters and activations are such tensors; the arguments of the model are real, so that decisions
by a mask or by positions are made as ever.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stageline.capturing.alive import Alive
from stageline.capturing.meter import bytes_of
from stageline.partitioning.device import Device
from stageline.planning.counting import Counting
from stageline.torch_private import FakeTensorMode, storage_of, tree_flatten, tree_unflatten

_ACCUMULATED = 3  # a gradient is read, the sum is read and written


@dataclass(frozen=True)
class BlockEstimate:
    """What a block takes, in nanoseconds and bytes; see ``BlockCosts``."""

    forward: int
    input_gradient: int
    backward: int
    input_bytes: int
    activation_bytes: int
    input_gradient_frees: int
    output_bytes: int
    kept_output_bytes: int
    wants_input_gradient: bool
    flops: int


class Abstraction:
    """Runs blocks without numbers on a described device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def copy_of(self, stage: nn.Module) -> nn.Module:
        """Return a stage whose parameters and buffers have no numbers; nothing is allocated."""
        memo: dict[int, Any] = {}
        for tensor in (*stage.parameters(), *stage.buffers()):
            memo[id(tensor)] = self._without_numbers(tensor)
        return copy.deepcopy(stage, memo)

    def _without_numbers(self, tensor: Tensor) -> Tensor:
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def run(
        self,
        stage: nn.Module,
        call: Callable[[Any], Any],
        value: Any,
        arguments: Sequence[Any] = (),
        *,
        is_first: bool = False,
    ) -> tuple[BlockEstimate, Any]:
        """Run a block forward and back; also return what it makes, for the next one.

        Args:
            stage: The block.
            call: Runs it on a value.
            value: What the one before has made.
            arguments: Those of the model, which are the caller's and do not count.
            is_first: Whether gradients of these, where they require one, are made here.
        """
        parameters = [p for p in stage.parameters() if p.requires_grad]
        state = [*stage.parameters(), *stage.buffers()]
        real = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        state += [*real, *map(self._mode.from_tensor, real)]  # as they are, and where both meet
        wanted: list[Any] = [leaf for leaf in real if leaf.requires_grad] if is_first else []
        value, edges = _entered(value)
        wanted += edges
        given = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
        inputs = Alive(*given)
        with torch.enable_grad(), Alive(*given) as alive:
            del given
            forward = Counting(self._device)
            with forward:
                made = call(value)
            del value
            output, roots, gradients = _left(made)
            outputs = Alive(*(x for x in tree_flatten(made)[0] if isinstance(x, Tensor)))
            del made
            own = [*state, *(x for x in tree_flatten(output)[0] if isinstance(x, Tensor))]
            own += gradients
            kept, input_bytes = alive.count(own), inputs.count(state)
            kept_output_bytes = outputs.count(state)
            half = Counting(self._device, state)
            _differentiate(half, roots, wanted, gradients, retain=True)
            whole = Counting(self._device, state)
            _differentiate(whole, roots, [*wanted, *parameters], gradients, retain=False)
        waiting = _waiting(whole, half, state) if wanted else bytes_of(gradients) + kept
        accumulated = 1e9 * _ACCUMULATED * bytes_of(parameters) / self._device.bandwidth
        return BlockEstimate(
            forward=round(forward.nanoseconds),
            input_gradient=round(half.nanoseconds),
            backward=round(whole.nanoseconds + (accumulated if roots else 0)),
            input_bytes=input_bytes,
            activation_bytes=max(kept - input_bytes, 0),
            input_gradient_frees=kept - waiting,
            output_bytes=bytes_of(output),
            kept_output_bytes=kept_output_bytes,
            wants_input_gradient=bool(wanted),
            flops=forward.flops + whole.flops,
        ), output


def _differentiate(
    counting: Counting,
    roots: Sequence[GradientEdge],
    wanted: Sequence[Any],
    gradients: Sequence[Tensor],
    *,
    retain: bool,
) -> None:
    if roots and wanted:
        with counting:
            torch.autograd.grad(roots, wanted, gradients, retain_graph=retain, allow_unused=True)


# Makes ``_Enter`` part of the graph; nothing ever accumulates into it.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Enter(torch.autograd.Function):
    """Aliases that are no leaves: as in a pipeline, a layer may work on them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Any:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *(None for _ in gradients))


def _entered(value: Any) -> tuple[Any, list[GradientEdge]]:
    """Return a value as the input of a graph of its own, and where its gradients would come out.

    It is a copy: whether the graph holds it is seen where nobody else does.
    """
    given, spec = tree_flatten(value)
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in given]
    flags = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given]
    wanting = {index: leaves[index] for index, flag in enumerate(flags) if flag}
    if not wanting:
        return tree_unflatten(leaves, spec), []
    apply: Any = _Enter.apply  # untyped in torch
    aliases = apply(_ANCHOR, *wanting.values())
    for index, alias in zip(wanting, aliases, strict=True):
        leaves[index] = alias
    return tree_unflatten(leaves, spec), [get_gradient_edge(alias) for alias in aliases]


def _left(made: Any) -> tuple[Any, list[GradientEdge], list[Tensor]]:
    """Return a copy of what a block made, where its gradients enter, and such gradients."""
    leaves, spec = tree_flatten(made)
    leaving = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    copies = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    gradients = [torch.ones_like(leaf) for leaf in leaving]
    return tree_unflatten(copies, spec), [get_gradient_edge(x) for x in leaving], gradients


def _waiting(whole: Counting, half: Counting, state: Sequence[Tensor]) -> int:
    """Return the bytes that W needs: what those products were run on that are not part of I."""
    rest = Counter(whole.products)
    rest.subtract(half.products)
    fixed = {storage_of(tensor) for tensor in state}
    sizes: dict[int, int] = {}
    for what, tensors in whole.used:
        # One operation makes both gradients of a convolution.
        if rest[what] > 0 or "convolution_backward" in what[0]:
            rest[what] -= 1
            sizes.update((storage_of(x), x.untyped_storage().nbytes()) for x in tensors)
    return sum(size for storage, size in sizes.items() if storage not in fixed)
