"""How much a stage really holds of one microbatch: after F, after I, after W.

What I releases differs from stage to stage. A deferred W needs the input of every product and the
gradient of its output, and those gradients are new: a stack of nothing but products holds more
after I than before, a Transformer layer a little less. The simulator has to be told.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.alive import Alive
from stageline.running.boundary import Packet, enter, leave
from stageline.running.split.deferred import Deferred
from stageline.running.split.mode import Splitting, splittable_parameters
from stageline.torch_private import run_backward

_MIB = 2**20


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one stage holds of one microbatch, beside parameters and their gradients.

    Attributes:
        input_bytes: What arrived and is still held after F.
        after_forward: Its graph, after F.
        after_input_gradient: What W still needs, after I.
        after_weight_gradient: After W; nothing, unless the stage itself keeps something.
        output_bytes: The part of its graph that is its own output: a stage that goes on from there
            does not hold that a second time.
        is_split: Whether something was left for W, so that I and W both have work.
        wants_input_gradient: Whether its input has a gradient; if not, I does nothing.
    """

    input_bytes: int
    after_forward: int
    after_input_gradient: int
    after_weight_gradient: int
    output_bytes: int = 0
    is_split: bool = field(default=True, compare=False)
    wants_input_gradient: bool = field(default=True, compare=False)

    @property
    def released_by_i(self) -> float:
        """The part of what F keeps that I releases; negative where I adds to it."""
        kept = self.after_forward - self.after_weight_gradient
        return (self.after_forward - self.after_input_gradient) / kept if kept else 0.0

    def __str__(self) -> str:
        f, i, w = (
            f"{held / _MIB:.1f}"
            for held in (self.after_forward, self.after_input_gradient, self.after_weight_gradient)
        )
        return f"MiB after F {f}, after I {i}, after W {w}; I releases {self.released_by_i:.0%}"


def measure_memory(stages: Sequence[nn.Module], *args: Any) -> list[StageMemory]:
    """Run each stage on what the one before gives, forward and back, and see what is alive.

    The stages are copied, so their gradients and statistics stay as they are.

    Args:
        stages: As a pipeline has them, first to last.
        args: One microbatch for the first.

    Example:
        >>> stack = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        >>> for memory in measure_memory([stack, stack], torch.randn(256, 512)):
        ...     print(memory)
        MiB after F 2.0, after I 2.5, after W 0.0; I releases -25%
        MiB after F 2.0, after I 4.0, after W 0.0; I releases -100%
    """
    found = []
    with torch.random.fork_rng(devices=[]):
        packet = leave(args if len(args) != 1 else args[0])[0]
        for index, stage in enumerate(stages):
            twin = copy.deepcopy(stage)
            call = twin if index else partial(_unpacked, twin)
            memory, packet = measure_call(twin, call, packet)
            found.append(memory)
    return found


def _unpacked(stage: nn.Module, value: Any) -> Any:
    return stage(*value) if isinstance(value, tuple) else stage(value)


def costs_of(memories: Iterable[StageMemory]) -> dict[str, list[int]]:
    """Return what a simulation is told of the memory of each stage: ``Costs(**costs_of(...))``.

    Example:
        >>> costs_of([StageMemory(10, 100, 70, 0)])
        {'activation_bytes': [100], 'input_bytes': [10], 'input_gradient_frees': [30]}
    """
    each = list(memories)
    return {
        "activation_bytes": [m.after_forward - m.after_weight_gradient for m in each],
        "input_bytes": [m.input_bytes for m in each],
        "input_gradient_frees": [m.after_forward - m.after_input_gradient for m in each],
    }


def measure_call(
    stage: nn.Module, call: Callable[[Any], Any], given: Packet | None, *, is_lent: bool = False
) -> tuple[StageMemory, Packet]:
    """Run one stage forward and back; also return its output, for the next one.

    Args:
        stage: Whose parameters and buffers do not count.
        call: Runs it on a value.
        given: What comes to it; None if only the arguments of the model do, which are the caller's.
        is_lent: Whether what comes to it is the caller's too, and does not count.
    """
    coming = Packet([None], None, (False,)) if given is None else _copied(given)
    arrived = [x for x in coming.leaves if isinstance(x, Tensor)]
    state = [*stage.parameters(), *stage.buffers(), *(arrived if is_lent else ())]
    inputs = Alive(*arrived)
    deferred = Deferred()
    with torch.enable_grad(), Alive(*arrived) as alive:
        del arrived
        packet, roots, slot = _forward(stage, call, coming, deferred)
        del coming
        kept = _copied(packet)
        own = [x for x in kept.leaves if isinstance(x, Tensor)]
        outputs = Alive(*(x for x in packet.leaves if isinstance(x, Tensor)))
        del packet
        after_forward, input_bytes = alive.count([*state, *own]), inputs.count(state)
        output_bytes = outputs.count(state)
        needing = zip(kept.leaves, kept.differentiable or (False,) * len(kept.leaves), strict=True)
        gradients = [torch.ones_like(leaf) for leaf, flag in needing if flag]
        wants = slot is not None
        if slot is None:
            deferred = Deferred.whole(roots, gradients)
        elif roots:
            slot.is_open = deferred.is_open = True
            run_backward(roots, gradients)
        del roots, slot, gradients
        after_input = alive.count([*state, *own])
        deferred.run()
        given_back = [parameter.grad for parameter in stage.parameters()]
        after_weight = alive.count([*state, *own, *given_back])
    held = (input_bytes, after_forward, after_input, after_weight, output_bytes)
    return StageMemory(*held, bool(deferred.places), wants), kept


def _copied(packet: Packet) -> Packet:
    return packet.with_leaves([x.clone() if isinstance(x, Tensor) else x for x in packet.leaves])


def _forward(
    stage: nn.Module, call: Callable[[Any], Any], coming: Packet, deferred: Deferred
) -> Any:
    """Run F as a pipeline does; the output, where gradients enter, where those of inputs lie."""
    entered = enter(coming)
    leaves = splittable_parameters(stage)
    if entered.slot is None or not leaves:
        return *leave(call(entered.value)), entered.slot
    with Splitting(leaves, deferred) as mode:
        return *leave(mode.held(call(entered.value))), entered.slot
