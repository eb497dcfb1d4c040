"""What the blocks of a model weigh, as running sums: what balance is computed from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stageline.capturing.graph import Cuttable
from stageline.partitioning.balance import earliest_begins, running_sum
from stageline.partitioning.costs import BlockCosts, BoundaryCosts, ModelCosts
from stageline.partitioning.holdings import Holding
from stageline.scheduling import Costs, Kind

_Places = NDArray[np.int64]

# Weights, their gradient, and the two moments of Adam.
COPIES_OF_PARAMETERS = 4

_NO_MATTER = 2**62


@dataclass(frozen=True)
class Blocks:
    """One number per block, in forward order.

    Attributes:
        time: Nanoseconds of forward and backward, without those of a boundary.
        time_in_one: The same where the backward is not split.
        boundary: What each stage takes beside its blocks.
        boundary_in_one: The same where the backward is not split.
        wants_gradient: Whether somebody waits for the gradient of its input. A stage that begins
            where nobody does splits nothing.
        parameters: How many numbers it trains or keeps.
        parameter_bytes: Their bytes.
        kept: Bytes that F keeps, the input included.
        frees: Those of them that I releases.
        inputs: Those of them that are the input.
        shared: Those of them that the block before keeps as well, as its output.
        crossing: Bytes that cross a cut behind it.
    """

    time: Sequence[int]
    time_in_one: Sequence[int]
    wants_gradient: Sequence[bool]
    parameters: Sequence[int]
    parameter_bytes: Sequence[int]
    kept: Sequence[int]
    frees: Sequence[int]
    inputs: Sequence[int]
    shared: Sequence[int]
    crossing: Sequence[int]
    boundary: int = 0
    boundary_in_one: int = 0

    def __len__(self) -> int:
        return len(self.time)

    @classmethod
    def of_graph(cls, graph: Cuttable, cuts: Sequence[int] | None = None) -> Blocks:
        """Return what the graph itself estimates, of what lies between its cuts or others."""
        ends = [0, *(graph.cuts if cuts is None else cuts), graph.num_nodes]
        loads = [graph.load(begin, end) for begin, end in pairwise(ends)]
        nothing = [0] * len(loads)
        return cls(
            time=[load.time for load in loads],
            time_in_one=[load.time for load in loads],
            wants_gradient=[True] * len(loads),
            parameters=[load.parameters for load in loads],
            parameter_bytes=[load.parameter_bytes for load in loads],
            kept=[load.activation_bytes for load in loads],
            frees=nothing,
            inputs=nothing,
            shared=nothing,
            crossing=[_crossing(graph, place) for place in ends[1:-1]] + [0],
        )

    @classmethod
    def of_costs(cls, costs: ModelCosts, kinds: Collection[Kind] = ()) -> Blocks:
        """Return what was measured or estimated.

        Args:
            costs: That.
            kinds: What the schedule runs: the backward in one piece, or as I and W; perhaps R.
        """
        each = costs.blocks
        shared = [min(a.kept_output_bytes, b.input_bytes) for a, b in pairwise(each)]
        in_one = {*kinds} - {Kind.INPUT_GRADIENT}
        boundary, boundary_in_one = (_time(costs.boundary, which) for which in (kinds, in_one))
        return cls(
            time=[_time(block, kinds) - boundary for block in each],
            time_in_one=[_time(block, in_one) - boundary_in_one for block in each],
            boundary=boundary,
            boundary_in_one=boundary_in_one,
            wants_gradient=[block.wants_input_gradient for block in each],
            parameters=[block.parameters for block in each],
            parameter_bytes=[block.parameter_bytes for block in each],
            kept=[block.input_bytes + block.activation_bytes for block in each],
            frees=[block.input_gradient_frees for block in each],
            inputs=[block.input_bytes for block in each],
            shared=[0, *shared],
            crossing=[block.output_bytes for block in each],
        )

    @cached_property
    def _sums(self) -> dict[str, _Places]:
        """Running sums of what is fixed, kept by one stage, and left by I; and what is at cuts."""
        kept, shared = _array(self.kept), _array(self.shared)
        return {
            "fixed": running_sum(self.parameter_bytes) * COPIES_OF_PARAMETERS,
            "whole": running_sum((kept - shared).tolist()),
            "halved": running_sum((kept - _array(self.frees)).tolist()),
            "shared": np.append(shared, 0),
            "inputs": np.append(_array(self.inputs), 0),
            "crossing": np.array([0, *self.crossing], dtype=np.int64),
        }

    def memory(self, holding: Holding, *, splits: bool = True) -> tuple[_Places, _Places]:
        """Return heads and tails: a stage from a to b needs ``heads[b] - tails[a]`` bytes then.

        Args:
            holding: What it holds.
            splits: Whether I does something; if not, it keeps everything, and the gradient that
                has come for the output.
        """
        of = self._sums
        whole = holding.whole + (0 if splits else holding.halved)
        halved = holding.halved if splits else 0
        sums = of["fixed"] + whole * of["whole"] + halved * of["halved"]
        # What the block before keeps as well is no part of this stage: it is kept here.
        tails = sums - whole * of["shared"] - holding.inputs * of["inputs"]
        return sums if splits else sums + holding.halved * of["crossing"], tails

    def earliest_begins(
        self, moments: Iterable[Holding], limit: int, *, is_first: bool
    ) -> NDArray[np.intp]:
        """Return, for every end, the first place from which on a stage keeps a limit of bytes.

        Args:
            moments: When it may hold most.
            limit: The bytes.
            is_first: Whether it is the first stage, which begins where the model does.
        """
        found = []
        for moment in moments:
            for splits, places in self._beginnings(is_first):
                heads, tails = self.memory(moment, splits=splits)
                found.append(earliest_begins(heads, np.where(places, tails, _NO_MATTER), limit))
        earliest: NDArray[np.intp] = np.maximum.reduce(found)
        return earliest

    def _beginnings(self, is_first: bool) -> list[tuple[bool, NDArray[np.bool_]]]:
        """Return where a stage may begin that splits its backward, and where one that does not."""
        splits = np.array([*self.wants_gradient, True])
        is_start = np.arange(len(splits)) == 0
        if is_first:
            return [(self.wants_gradient[0], is_start)]
        places = [(True, splits & ~is_start), (False, ~splits & ~is_start)]
        return [(kind, where) for kind, where in places if where.any()]

    def most_needed(self, holding: Holding) -> int:
        """Return at least as many bytes as any stage needs then."""
        tables = (self.memory(holding, splits=splits) for splits in (True, False))
        return max(int(heads.max() - tails.min()) for heads, tails in tables)

    def held(self, sizes: Sequence[int]) -> Costs:
        """Return what a simulation is told of the memory of stages of so many blocks."""

        def each(holding: Holding) -> NDArray[np.int64]:
            return _array(self.needed(sizes, [(holding,)] * len(sizes)))

        whole = each(Holding(1))
        begins = [0, *np.cumsum(sizes).tolist()[:-1]]
        return Costs(
            activation_bytes=(whole - each(Holding(0))).tolist(),
            input_gradient_frees=(whole - each(Holding(0, 1))).tolist(),
            input_bytes=[self.inputs[begin] for begin in begins],
        )

    def needed(self, sizes: Sequence[int], holdings: Sequence[Sequence[Holding]]) -> list[int]:
        """Return the bytes that each stage of so many blocks needs at most."""
        ends = [0, *np.cumsum(sizes).tolist()]
        found = []
        for (begin, end), moments in zip(pairwise(ends), holdings, strict=True):
            splits = self.wants_gradient[begin]
            tables = [self.memory(moment, splits=splits) for moment in moments]
            found.append(max(int(heads[end] - tails[begin]) for heads, tails in tables))
        return found


def _time(block: BlockCosts | BoundaryCosts, kinds: Collection[Kind]) -> int:
    halves = block.input_gradient + block.weight_gradient
    time = block.forward + (halves if Kind.INPUT_GRADIENT in kinds else block.backward)
    return time + (block.forward if Kind.RECOMPUTE in kinds else 0)


def _array(values: Sequence[int]) -> _Places:
    return np.array(values, dtype=np.int64)


def _crossing(graph: Cuttable, place: int) -> int:
    return sum(value.num_bytes for value in graph.crossing(place))
