"""What would a candidate cost? Costs of blocks and links in, a prediction out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from stageline.partitioning.blocks import COPIES_OF_PARAMETERS
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.device import Device
from stageline.partitioning.holdings import Holdings
from stageline.planning.candidates import Candidate, Method
from stageline.planning.cutting import Cutter
from stageline.planning.proposal import Prediction
from stageline.planning.searching.problem import Metric
from stageline.scheduling import Costs, Schedule, Simulation, simulate
from stageline.scheduling.memory import peak_bytes


class Evaluator:
    """Knows the costs of a model on a machine, for microbatches of any size.

    Args:
        costs: Of its blocks.
        device: What connects the ranks. Those of a pipeline lie side by side, and so do its copies.
        metric: What counts as the time of a step.
    """

    def __init__(self, costs: ModelCosts, device: Device | None, metric: Metric) -> None:
        self._costs, self._device = costs, device
        self.metric = metric
        self.cutter = lru_cache(maxsize=None)(self._cutter)
        self.schedule = lru_cache(maxsize=8)(_build)
        self.holdings = lru_cache(maxsize=8)(self._holdings)
        self.num_simulated = 0

    def _cutter(self, rows: int) -> Cutter:
        return Cutter(self._costs.at(rows))

    def _holdings(self, method: Method, num_ranks: int, num_microbatches: int) -> Holdings:
        return Holdings.of(self.schedule(method, num_ranks, num_microbatches))

    def simulated(self, candidate: Candidate, sizes: Sequence[int]) -> Costs:
        """Return what the simulator is told of a candidate that is cut so."""
        costs = self.cutter(candidate.rows).costs
        if self._device is None:
            return costs.simulated(sizes)
        ranks = candidate.method.placement(candidate.num_ranks)
        return costs.placed(sizes, ranks, self._device)

    def reduction(self, candidate: Candidate, parameter_bytes: int) -> int:
        """Return the nanoseconds in which the copies of a rank add up their gradients.

        Around a ring: everybody sends a part of them to his neighbour, 2 * (copies - 1) times.
        """
        copies = candidate.data_parallel
        if copies == 1 or self._device is None:
            return 0
        neighbour = self._device.between(0, candidate.num_ranks)
        return 2 * (copies - 1) * neighbour.time(-(-parameter_bytes // copies))

    @property
    def agreement(self) -> float:
        """The seconds in which ranks agree that a step begins, and that it is over."""
        return 0.0 if self._device is None else self._device.agreement

    def least_beyond(self, candidate: Candidate) -> float:
        """Return the seconds of a step beyond its actions, at least, however the model is cut."""
        whole = self.cutter(candidate.rows).fixed_bytes // COPIES_OF_PARAMETERS
        return self.reduction(candidate, whole // candidate.num_ranks) / 1e9 + self.agreement

    def needs(self, candidate: Candidate, sizes: Sequence[int], schedule: Schedule) -> list[int]:
        """Return the bytes that each rank needs."""
        held = peak_bytes(schedule, self.cutter(candidate.rows).costs.simulated(sizes))
        assert held is not None  # costs of models know their activations
        fixed = self._parameters(candidate, sizes)
        return [
            int(peak) + size * COPIES_OF_PARAMETERS for peak, size in zip(held, fixed, strict=True)
        ]

    def _parameters(self, candidate: Candidate, sizes: Sequence[int]) -> list[int]:
        """Return the bytes of the parameters of each rank, once."""
        stages = self.cutter(candidate.rows).costs.stages(sizes)
        found = [0] * candidate.num_ranks
        placement = candidate.method.placement(candidate.num_ranks)
        for stage, rank in zip(stages, placement, strict=True):
            found[rank] += stage.parameter_bytes
        return found

    def predict(self, candidate: Candidate, sizes: Sequence[int], schedule: Schedule) -> Prediction:
        """Simulate a step."""
        self.num_simulated += 1
        simulation = simulate(schedule, self.simulated(candidate, sizes))
        fixed = self._parameters(candidate, sizes)
        reduction = self.reduction(candidate, max(fixed))
        kept = [size * COPIES_OF_PARAMETERS for size in fixed]
        found = _prediction(simulation, reduction, kept, self.metric)
        seconds = found.seconds + self.agreement
        return replace(found, seconds=seconds, agreement=self.agreement)


def _prediction(
    simulation: Simulation, reduction: int, fixed: Sequence[int], metric: Metric
) -> Prediction:
    assert simulation.peak_bytes is not None  # costs of models know their activations
    step = simulation.T if metric == "T" else simulation.span
    bubble = simulation.bubble if metric == "T" else simulation.span_bubble
    return Prediction(
        seconds=(int(step) + reduction) / 1e9,
        T=int(simulation.T),
        span=int(simulation.span),
        bubble=float(bubble),
        busy=tuple(int(busy) for busy in simulation.busy),
        reduction=reduction / 1e9,
        parameter_bytes=tuple(fixed),
        activation_bytes=tuple(int(peak) for peak in simulation.peak_bytes),
    )


def _build(method: Method, num_ranks: int, num_microbatches: int) -> Schedule:
    return method.build(num_ranks, num_microbatches)
