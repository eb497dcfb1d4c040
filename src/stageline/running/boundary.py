"""Where one stage ends and the next begins: values leave a graph and enter another.

    stage 0            packet             stage 1
    ...──▶ output ── leave() ──▶ leaves ── enter() ──▶ input ──▶ ...      forward
    ...◀── roots  ◀──────────── gradients ◀──────────── slot  ◀── ...      backward

Each stage has an autograd graph of its own. ``leave`` keeps the *edges* of the outputs, not the
tensors, so a sent activation can be freed; ``enter`` hands out aliases whose gradients fall into a
slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stageline.errors import EdgeError
from stageline.running import torch_private as trees


class Packet:
    """A value on its way between two stages: flat leaves, and what is needed to rebuild the tree.

    Attributes:
        leaves: Detached tensors and plain values.
        spec: The structure; None where the value is one single leaf.
        differentiable: For each leaf, whether a gradient will travel back for it.
    """

    __slots__ = ("differentiable", "leaves", "spec")

    def __init__(
        self,
        leaves: list[Any],
        spec: trees.TreeSpec | None = None,
        differentiable: Sequence[bool] = (),
    ) -> None:
        self.leaves = leaves
        self.spec = spec
        self.differentiable = differentiable

    def value(self) -> Any:
        """Return the value as the sending stage made it."""
        return self.leaves[0] if self.spec is None else trees.tree_unflatten(self.leaves, self.spec)

    def to(self, device: torch.device) -> Packet:
        """Return the packet with its tensors on another device; no copy where they already are."""
        leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return Packet(leaves, self.spec, self.differentiable)


def leave(value: Any) -> tuple[Packet, list[GradientEdge]]:
    """Detach a stage's output; return the packet, and the edges where gradients enter."""
    leaves: list[Any]
    if isinstance(value, Tensor):
        leaves, spec = [value], None
    else:
        leaves, spec = trees.tree_flatten(value)
    roots: list[GradientEdge] = []
    differentiable = [False] * len(leaves)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            _refuse_hidden_tensors(leaf)
            continue
        if leaf.requires_grad:
            roots.append(gradient_edge(leaf))
            differentiable[index] = True
        # detach() shares the version counter: if the next stage changes the value in place
        # although this one has saved it, autograd notices, as it would in the plain model.
        leaves[index] = leaf.detach()
    return Packet(leaves, spec, differentiable), roots


def _refuse_hidden_tensors(leaf: Any) -> None:
    """A tensor inside an object that torch cannot open would take its graph along unseen."""
    hidden = [name for name, value in getattr(leaf, "__dict__", {}).items() if _is_tensor(value)]
    if hidden:
        raise EdgeError(
            f"a stage returned a {type(leaf).__name__} with tensors in {', '.join(hidden)}: "
            "return a tuple or a dict, or register the class as a pytree node"
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the place in the graph where a tensor's gradient enters."""
    if tensor.grad_fn is None:  # a parameter that the stage returns as it is
        return get_gradient_edge(tensor)
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


class GradientSlot:
    """Where gradients of a stage's inputs wait to be sent back; None: input never used."""

    __slots__ = ("gradients",)

    def __init__(self, count: int) -> None:
        self.gradients: tuple[Tensor | None, ...] = (None,) * count


def enter(packet: Packet) -> tuple[Any, GradientSlot | None]:
    """Return the value for the next stage, and the slot for its gradients if any will come."""
    entering = [index for index, needed in enumerate(packet.differentiable) if needed]
    if not entering:
        return packet.value(), None
    slot = GradientSlot(len(entering))
    apply: Any = _Enter.apply  # untyped in torch
    aliases = apply(slot, _anchor(), *(packet.leaves[index] for index in entering))
    leaves = packet.leaves.copy()
    for index, alias in zip(entering, aliases, strict=True):
        leaves[index] = alias
    return Packet(leaves, packet.spec).value(), slot


def _anchor() -> Tensor:
    """Return a tensor that makes ``_Enter`` part of the graph; nothing ever accumulates into it."""
    return torch.empty(0, requires_grad=True)


class _Enter(torch.autograd.Function):
    """Aliases of received tensors that are not leaves.

    A leaf would not do. A first layer that works in place may not touch a leaf or a view of one;
    and the gradient of a leaf is brought into the leaf's memory layout, which changes the last
    bits of what the plain model computes. Here the gradient is taken exactly as it comes.
    """

    @staticmethod
    def forward(ctx: Any, slot: GradientSlot, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.slot.gradients = gradients
        return (None, None, *(None for _ in gradients))
