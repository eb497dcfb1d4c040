"""Where one stage ends and the next begins: values leave a graph and enter another.

    stage 0            packet             stage 1
    ...──▶ output ── leave() ──▶ leaves ── enter() ──▶ input ──▶ ...      forward
    ...◀── roots  ◀──────────── gradients ◀──────────── slot  ◀── ...      backward

Each stage has an autograd graph of its own. ``leave`` keeps the *edges* of the outputs, not the
tensors, so a sent activation can be freed; ``enter`` hands out aliases whose gradients fall into a
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stageline import torch_private as trees
from stageline.errors import EdgeError
from stageline.running.hidden import find_hidden_tensor
from stageline.torch_private import applier
from stageline.wording import a_kind


class Packet:
    """A value on its way between two stages: flat leaves, and what is needed to rebuild the tree.

    Attributes:
        leaves: Detached tensors and plain values; None where a leaf repeats an earlier one.
        spec: The structure; None where the value is one single leaf.
        differentiable: For each leaf, whether a gradient will travel back for it.
        repeats: (position, earlier position) of each leaf that is one tensor with an earlier one.
        overlaps: Positions of tensors that lie in the same memory as another one.
    """

    __slots__ = ("differentiable", "leaves", "overlaps", "repeats", "spec")

    def __init__(
        self,
        leaves: list[Any],
        spec: trees.TreeSpec | None = None,
        differentiable: Sequence[bool] = (),
        repeats: Sequence[tuple[int, int]] = (),
        overlaps: Sequence[int] = (),
    ) -> None:
        self.leaves = leaves
        self.spec = spec
        self.differentiable = differentiable
        self.repeats = repeats
        self.overlaps = overlaps

    def with_leaves(self, leaves: list[Any]) -> Packet:
        """Return the packet with other leaves in the same places."""
        return Packet(leaves, self.spec, self.differentiable, self.repeats, self.overlaps)

    def wait(self) -> Packet:
        """Return the packet: between stages of one rank, it is its own receipt."""
        return self

    def read(self, use: Callable[[Packet], None]) -> None:
        """Call a function with it."""
        use(self)

    def value(self) -> Any:
        """Return the value as the sending stage made it."""
        if self.spec is None:
            return self.leaves[0]
        leaves = self.leaves
        if self.repeats:
            leaves = leaves.copy()
            for position, earlier in self.repeats:
                leaves[position] = leaves[earlier]
        return trees.tree_unflatten(leaves, self.spec)

    def to(self, device: torch.device) -> Packet:
        """Return the packet with its tensors on another device; no copy where they already are."""
        return self.with_leaves(
            [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        )


_ONE = (True,)


Root = GradientEdge | Tensor
"""Where a gradient enters a graph: an edge, or a tensor that may be kept alive for it."""


def leave(value: Any, buffers: Sequence[Tensor] = ()) -> tuple[Packet, list[Root]]:
    """Detach a stage's output; return the packet, and the edges where gradients enter.

    Args:
        value: What the stage returned.
        buffers: Those of the stage: one that it returns is copied, for its next call may change it.
    """
    # detach() shares the version counter, here and below: if the next stage changes the value in
    # place although this one has saved it, autograd notices, as it would in the plain model.
    if isinstance(value, Tensor) and value.requires_grad:  # by far the most common value
        return Packet([value.detach()], None, _ONE), [gradient_edge(value)]
    packet = Packet([value]) if isinstance(value, Tensor) else _flatten(value)
    leaves: list[Any] = packet.leaves
    roots: list[Root] = []
    differentiable = [False] * len(leaves)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            _refuse_hidden_tensors(leaf)
        elif leaf.requires_grad:
            roots.append(gradient_edge(leaf))
            differentiable[index] = True
            leaves[index] = leaf.detach()
        else:
            is_buffer = any(_share_memory(leaf, buffer) for buffer in buffers)
            leaves[index] = leaf.clone() if is_buffer else leaf.detach()
    packet.differentiable = differentiable
    return packet, roots


def copy_shared(packet: Packet, kept: Iterable[Any]) -> None:
    """Put copies in place of what lies in the memory of tensors that are kept.

    Example:
        >>> x = torch.zeros(2)
        >>> packet = Packet([x.view(1, 2), 3])
        >>> copy_shared(packet, [x])
        >>> packet.leaves[0].add_(1), x
        (tensor([[1., 1.]]), tensor([0., 0.]))
    """
    taken = {_address(each) for each in kept if isinstance(each, Tensor)} - {0}
    packet.leaves = [
        leaf.clone() if isinstance(leaf, Tensor) and _address(leaf) in taken else leaf
        for leaf in packet.leaves
    ]


def _flatten(value: Any) -> Packet:
    """Flatten a tree, and note which tensors are the same, or lie in the same memory."""
    leaves, spec = trees.tree_flatten(value)
    first: dict[int, int] = {}
    repeats = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and first.setdefault(id(leaf), index) != index:
            repeats.append((index, first[id(leaf)]))
    for position, _ in repeats:
        leaves[position] = None
    places: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            places.setdefault(_address(leaf) or id(leaf), []).append(index)
    overlaps = sorted(index for same in places.values() if len(same) > 1 for index in same)
    return Packet(leaves, spec, (), repeats, overlaps)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    address = _address(one)
    return address != 0 and address == _address(other)


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none that could be shared."""
    if tensor.layout is not torch.strided:
        return 0
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _refuse_hidden_tensors(leaf: Any) -> None:
    """A tensor inside an object that torch cannot open would take its graph along unseen."""
    where = find_hidden_tensor(leaf)
    if where is not None:
        raise EdgeError(
            f"a stage returned {a_kind(leaf)} with a tensor in {where}: return a tuple or "
            "a dict, or register the class as a pytree node"
        )


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the place in the graph where a tensor's gradient enters."""
    node = tensor.grad_fn
    if node is None:  # a parameter that the stage returns as it is
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


class GradientSlot(Protocol):
    """Where gradients of a stage's inputs wait to be sent back: the node by which they entered.

    Attributes:
        gradients: One for each input that needs one; None: input never used.
        is_open: Whether the backward of this stage runs; gradients that come before are refused.
    """

    is_open: bool

    @property
    def gradients(self) -> tuple[Tensor | None, ...]: ...


class Entered:
    """What a stage is called with.

    Attributes:
        value: The value that the stage before returned.
        slot: Where its gradients will lie; None if none will come.
    """

    __slots__ = ("_watched", "slot", "value")

    def __init__(
        self, value: Any, slot: GradientSlot | None, watched: Sequence[Tensor] = ()
    ) -> None:
        self.value = value
        self.slot = slot
        self._watched = [(tensor, tensor._version) for tensor in watched] if watched else ()

    def check(self) -> None:
        """Raise if the stage changed in place what lies in the same memory as another input."""
        if self._watched and any(tensor._version != seen for tensor, seen in self._watched):
            raise EdgeError(
                "the stage changed one of its inputs in place, and another input lies in the same "
                "memory: return a copy of one from the stage before, or do not work in place"
            )


def enter(packet: Packet) -> Entered:
    """Let a value into the graph of the next stage; a single tensor also gets there faster."""
    entering = [index for index, needed in enumerate(packet.differentiable) if needed]
    slot: Any = None
    if entering:
        aliases = _enter(_ANCHOR, *(packet.leaves[index] for index in entering))
        slot = aliases[0].grad_fn
        leaves = packet.leaves.copy()
        for index, alias in zip(entering, aliases, strict=True):
            leaves[index] = alias
        packet = packet.with_leaves(leaves)
    watched = [packet.leaves[index] for index in packet.overlaps]
    return Entered(packet.value(), slot, [leaf for leaf in watched if not leaf.is_inference()])


# Makes ``_Enter`` part of the graph; nothing ever accumulates into it.
_ANCHOR = torch.empty(0, requires_grad=True)


class _Enter(torch.autograd.Function):
    """Aliases of received tensors that are not leaves.

    A leaf does only for few layers (``enter_leaf``). One that works in place may not touch a leaf
    or a view of one; and the gradient of a leaf is brought into the leaf's memory layout, which
    changes the last bits of what the plain model computes. Here it is taken exactly as it comes.

    What torch calls the context is the slot.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.gradients = (None,) * len(tensors)
        ctx.is_open = False
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.is_open:
            raise foreign_backward()
        ctx.gradients = gradients
        return (None, *(None for _ in gradients))


class _EnterOne(torch.autograd.Function):
    """The same for a single tensor, in two thirds of the time."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Any:
        ctx.gradients = _NOTHING
        ctx.is_open = False
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.is_open:
            raise foreign_backward()
        ctx.gradients = gradients
        return _NO_GRADIENTS


_NOTHING, _NO_GRADIENTS = (None,), (None, None)

_enter, _enter_one = applier(_Enter), applier(_EnterOne)


def enter_one(tensor: Tensor, slots: dict[Any, GradientSlot], key: Any) -> Tensor:
    """Do what ``enter`` does for a single tensor; put its slot into a table."""
    entered: Tensor = _enter_one(_ANCHOR, tensor)
    slots[key] = entered.grad_fn  # type: ignore[assignment]  # the context of _EnterOne
    return entered


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is of the common kind, and lies in memory without gaps and in order."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_contiguous()


class _LeafSlot:
    """The slot of a value that entered as a leaf: its gradient lies there."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        return (self._leaf.grad,)

    @property
    def is_open(self) -> bool:
        return True

    @is_open.setter
    def is_open(self, value: bool) -> None:
        if self._leaf.grad is not None:
            raise foreign_backward()


def enter_leaf(tensor: Tensor, slots: dict[Any, GradientSlot], key: Any) -> Tensor:
    """Do the same where a leaf is exact (see ``StageProgram.takes_leaf``): 8 us less, with its B.

    The slot keeps the tensor, which is the packet's own, until its gradient is fetched.
    """
    slots[key] = _LeafSlot(tensor.requires_grad_())
    return tensor


def foreign_backward() -> RuntimeError:
    return RuntimeError(
        "backward() was called inside a stage's forward, and its gradient reached the "
        "input of the stage, where the stages before would miss it: add it to the loss"
    )
