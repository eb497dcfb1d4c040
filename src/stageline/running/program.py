"""What the executor runs: the program of one stage.

A program knows how its module is called, where it lives and whether its neighbours share its rank.
It does not know the schedule, and the schedule does not know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stageline import torch_private as trees
from stageline.capturing.direct.calls import Call, DirectCall
from stageline.capturing.direct.entrances import Entrance
from stageline.capturing.staged import VariantStage
from stageline.running.boundary import Packet
from stageline.running.recompute import Generators, generators_of
from stageline.running.split.layers import KnownLayers
from stageline.running.split.worth import Worth
from stageline.running.streams.candidates import PROMISE
from stageline.torch_private import is_bare


@dataclass(frozen=True)
class StageProgram:
    """Forward and state of one stage.

    Attributes:
        index: The stage, 0..num_stages-1.
        num_stages: How many stages the whole pipeline has.
        module: What runs; ``wrap_stage`` may have wrapped it.
        device: Where it runs.
        unpack_tuples: Whether a tuple from the stage before becomes several arguments.
        next_is_local: Whether the next stage lives on the same rank.
        previous_is_local: Whether the stage before lives on the same rank.
    """

    index: int
    num_stages: int
    module: nn.Module
    device: torch.device
    unpack_tuples: bool = False
    next_is_local: bool = False
    previous_is_local: bool = False

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(self.module.buffers())

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(self.module.parameters())

    @cached_property
    def holding(self) -> tuple[nn.Module, ...]:
        """Modules that have buffers of their own."""
        return tuple(module for module in self.module.modules() if module._buffers)

    @cached_property
    def normalising(self) -> tuple[nn.Module, ...]:
        """Modules that may keep statistics: BatchNorm and its like."""
        modules = self.module.modules()
        return tuple(m for m in modules if getattr(m, "track_running_stats", False))

    @cached_property
    def generators(self) -> Generators:
        """Generators that the stage may draw from and that R would not put back."""
        return generators_of(self.module)

    @cached_property
    def is_first(self) -> bool:
        return self.index == 0

    @cached_property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @cached_property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def directly(self) -> Call:
        """Return what does the same as a call of the module in less time, for one batch.

        It cannot be followed: not where random streams do, nor where a backward is split, for which
        there is ``known_layers``.
        """
        if type(self.module) is VariantStage and is_bare(self.module):
            return self.module.directly()
        return self._direct.now()

    @cached_property
    def worth(self) -> Worth:
        """Whether it pays to split the backward of the stage."""
        return Worth()

    @cached_property
    def known_layers(self) -> KnownLayers:
        """What calls the stage where its backward is split, if its layers are known."""
        return KnownLayers(self.module)

    def entrance(self) -> Entrance | None:
        """Return the layer that meets all of what the stage before has sent; after ``directly``.

        None where it is not known, or where somebody listens, or its weight is frozen; or where the
        code of the stage may be anything that a class has promised (``draws_nothing``).
        """
        if self._promises:
            return None
        found = self._direct.entrance
        if type(self.module) is VariantStage and is_bare(self.module):
            found = self.module.entrance()
        if found is None or not found.is_bare:
            return None
        weight = found.layer.weight
        is_usual = type(weight) is nn.Parameter and weight.is_floating_point()
        return found if is_usual and weight.requires_grad else None

    @cached_property
    def _promises(self) -> bool:
        return any(getattr(type(module), PROMISE, False) for module in self.module.modules())

    @cached_property
    def _direct(self) -> DirectCall:
        return DirectCall(self.module)

    def call(self, run: Call, value: Any) -> Any:
        """Run the stage on what the stage before returned.

        Args:
            run: The module, or what does the same.
            value: What the stage before returned.
        """
        if self.unpack_tuples and isinstance(value, tuple):
            return run(*value)
        return run(value)

    def call_first(self, run: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first stage on the arguments of the model."""
        if not self.is_on_cpu:
            args, kwargs = self.localise((args, kwargs))
        return run(*args, **kwargs)

    def takes_leaf(self) -> bool:
        """Whether a dense tensor may enter the stage as a leaf of its graph, to the last bit.

        So it is where all that happens to it is an ``nn.Linear``, which does not work in place and
        makes a dense gradient. It keeps its input for the gradient of its weight, so that a leaf
        takes no more memory; of a frozen weight it would.
        """
        module = self.module
        while type(module) is nn.Sequential and len(module) and is_bare(module):
            module = module[0]
        is_linear = type(module) is nn.Linear and is_bare(module)
        return is_linear and type(module.weight) is nn.Parameter and module.weight.requires_grad

    def localise(self, value: Any) -> Any:
        """Return a value of the caller's with its tensors on this stage's device."""
        if self.is_on_cpu:
            return value
        return trees.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), value)

    def accept(self, packet: Packet) -> Packet:
        """Return a packet with its tensors on this stage's device."""
        return packet if self.is_on_cpu else packet.to(self.device)
