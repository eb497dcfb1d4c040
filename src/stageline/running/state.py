"""What one rank holds during one step, in one object that is dropped when the step ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.direct.calls import Call
from stageline.capturing.direct.entrances import Entrance
from stageline.running.batch_norm import DeferredStatistics
from stageline.running.boundary import GradientSlot, Packet, Root
from stageline.running.first_runs import FirstRuns
from stageline.running.foreign import ForeignParameters
from stageline.running.loss import Losses, LossRule
from stageline.running.microbatches import Microbatches
from stageline.running.program import StageProgram
from stageline.running.recordings import Chosen
from stageline.running.split.deferred import Deferred
from stageline.running.split.layers import KnownLayers
from stageline.running.split.mode import splittable_parameters
from stageline.running.streams.calls import CallStreams
from stageline.running.transports.base import Endpoint, Receipt
from stageline.torch_private import saved_tensor_hooks

Key = tuple[int, int]  # stage, microbatch
_AT_ONCE = nullcontext()  # a BatchNorm updates its running statistics itself


class StepState:
    """Everything that one rank holds during one step.

    Attributes:
        arrivals: Inputs on their way to (stage, microbatch).
        departures: Outputs of (stage, microbatch) that wait for their send.
        roots: Where the gradients of the outputs of (stage, microbatch) enter its graph.
        slots: Where the gradients of the inputs of (stage, microbatch) will lie.
        gradients: Gradients on their way to the outputs of (stage, microbatch).
        returns: Gradients of the inputs of (stage, microbatch) that wait for their send; None where
            one has left already.
        deferred: What I of (stage, microbatch) leaves for W.
        first_runs: What F of (stage, microbatch) leaves for R.
        input_gradients: Gradients of the model's arguments, for each microbatch, where asked for.
        losses: Loss of each microbatch, and what it weighs.
        outputs: Output of each microbatch, detached, where the caller wants it.
        chosen: Of a recorded model, what each microbatch follows.
        streams: Where random numbers come from; None if nothing here can draw.
        statistics: Running statistics that change when the call ends; None if all change at once.
        endpoint: This rank's side of the transport; the runner sets it when rows begin.
        autocast: The device types for which forward runs under autocast.
        waited: Seconds spent waiting for packets in the current action; None if nobody observes.
        position: Which action of its row the rank is at, for those who wait for it.
        may_stay_whole: Whether the gradients of weights may as well be made in I.
    """

    endpoint: Endpoint

    def __init__(
        self,
        programs: Mapping[int, StageProgram],
        microbatches: Microbatches,
        *,
        builds_graph: bool,
        loss_rule: LossRule | None,
        keeps_outputs: bool,
        foreign: ForeignParameters,
        chosen: Sequence[Chosen] = (),
        streams: CallStreams | None = None,
    ) -> None:
        self.chosen = chosen
        self.streams = streams
        self.programs = programs
        self.microbatches = microbatches
        self.builds_graph = builds_graph
        self.loss_rule = loss_rule
        self.keeps_outputs = keeps_outputs
        self.foreign = foreign
        self.arrivals: dict[Key, Receipt] = {}
        self.departures: dict[Key, Packet] = {}
        self.roots: dict[Key, list[Root]] = {}
        self.slots: dict[Key, GradientSlot] = {}
        self.gradients: dict[Key, Receipt] = {}
        self.returns: dict[Key, Packet | None] = {}
        self.deferred: dict[Key, Deferred] = {}
        self.first_runs = FirstRuns()
        self.statistics: DeferredStatistics | None = None
        self.input_gradients: dict[int, Sequence[Tensor | None]] = {}
        self.losses = Losses()
        self.outputs: dict[int, Packet] = {}
        self.autocast: list[str] = []
        self.waited: float | None = None
        self.position = 0
        self.may_stay_whole = False
        self._shares: dict[float, Tensor] = {}
        self._leaves: dict[int, dict[int, nn.Parameter]] = {}
        self._splits: dict[int, bool] = {}
        self._follows_loss: bool | None = None
        self._takes_leaf: dict[int, bool] = {}
        self._calls: dict[int, Call] = {}
        self._known_layers: dict[int, KnownLayers | None] = {}
        self._entrances: dict[int, Entrance | None] = {}

    def share(self, weight: float, like: Tensor) -> Tensor:
        """Return a weight as root gradient of a loss; microbatches of one size have one."""
        known = self._shares.get(weight)
        if known is None or known.dtype is not like.dtype or known.dim() != like.dim():
            known = self._shares[weight] = torch.full_like(like, weight)
        return known

    def leaves(self, stage: int) -> dict[int, nn.Parameter]:
        """Return the parameters of a stage whose gradients can wait for W, by identity."""
        known = self._leaves.get(stage)
        if known is None:
            known = self._leaves[stage] = splittable_parameters(self.programs[stage].module)
        return known

    def is_decided(self, program: StageProgram) -> bool:
        """Whether it is known by now if gradients of a stage wait for W in this step."""
        return program.index in self._splits

    def splits(self, program: StageProgram, given: Sequence[Any]) -> bool:
        """Whether gradients of a stage wait for W; asked in its first F, and so for the whole step.

        Args:
            program: The stage.
            given: What goes into it.
        """
        known = self._splits.get(program.index)
        if known is None:
            parameters = self.leaves(program.index).values()
            is_worth = not self.may_stay_whole or program.worth.pays(
                parameters,
                given,
                num_stages=program.num_stages,
                num_microbatches=self.microbatches.count,
            )
            known = self._splits[program.index] = bool(parameters) and is_worth
        return known

    def stays_whole(self, program: StageProgram) -> None:
        """Let no gradient of a stage wait for W from now on."""
        self._splits[program.index] = False

    def is_whole(self, program: StageProgram) -> bool:
        """Whether all gradients of a stage are made in I, as its first F has found out."""
        return self._splits.get(program.index) is False

    def call_of(self, program: StageProgram) -> Call:
        """Return what to call to run a stage; chosen once in a step."""
        known = self._calls.get(program.index)
        if known is None:
            known = program.module if self._is_followed(program) else program.directly()
            self._calls[program.index] = known
        return known

    def known_layers(self, program: StageProgram) -> KnownLayers | None:
        """Return how to run a stage whose backward is split, if nobody has to follow its calls.

        Asked of it once in a step.
        """
        index = program.index
        if index not in self._known_layers:
            is_followed = bool(self.chosen) or self._is_followed(program)
            self._known_layers[index] = None if is_followed else program.known_layers.look()
        return self._known_layers[index]

    def _is_followed(self, program: StageProgram) -> bool:
        if self._defers_statistics(program):
            return True
        return self.streams is not None and self.streams.follows(program.index)

    def _defers_statistics(self, program: StageProgram) -> bool:
        return self.statistics is not None and self.statistics.follows(program.index)

    def counting(self, program: StageProgram, microbatch: int) -> AbstractContextManager[Any]:
        """Return what notes the running statistics of a microbatch while its stage runs."""
        if self.statistics is None or not self._defers_statistics(program):
            return _AT_ONCE
        return self.statistics.watching(program.index, microbatch)

    def takes_leaf(self, program: StageProgram) -> bool:
        """Whether values may enter a stage as leaves; asked of it once in a step.

        Under autocast, and where the user keeps saved tensors elsewhere, what the first layer keeps
        is not what it was given, and a leaf would be alive besides.
        """
        known = self._takes_leaf.get(program.index)
        if known is None:
            known = self._takes_leaf[program.index] = self._keeps_input and program.takes_leaf()
        return known

    def follows_loss(self) -> bool:
        """Whether the loss may do more than one of torch's does; asked of it once in a step."""
        if self._follows_loss is None:
            self._follows_loss = self.loss_rule is not None and not self.loss_rule.is_known()
        return self._follows_loss

    def entrance(self, program: StageProgram) -> Entrance | None:
        """Return where to meet the input of a stage, for its gradient to leave early; or None."""
        index = program.index
        if index not in self._entrances:
            is_direct = self.call_of(program) is not program.module
            is_read = self.streams is None or not program.is_last  # also the loss
            can_be_met = is_direct and is_read and not program.previous_is_local
            found = program.entrance() if can_be_met and self._keeps_input else None
            self._entrances[index] = found
        return self._entrances[index]

    @property
    def _keeps_input(self) -> bool:
        """Whether a first layer keeps for its backward just what it is given."""
        return not self.autocast and saved_tensor_hooks() is None

    def take(self, table: dict[Key, Receipt], program: StageProgram, key: Key) -> Packet:
        """Wait for a packet that a table promises, and count for how long if somebody observes."""
        receipt = table.pop(key)
        if self.waited is None:
            packet = receipt.wait()
        else:
            start = time.perf_counter()
            packet = receipt.wait()
            self.waited += time.perf_counter() - start
        return packet if program.is_on_cpu else program.accept(packet)
