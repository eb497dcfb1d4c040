"""Data where it is needed: which ranks hold the batch, and what goes to those that lack it.

    rank 0   step(x, target=y)  ── D0: which recordings, arguments ──▶  ranks 1, 2   step()
                                ── D1: targets ─────────────────────▶  rank 2, the last

Which ranks were given what is settled in the first call of each kind, through the hub. From then on
every rank knows what must travel, and no rank asks. The rank of stage 0 says which recording each
microbatch follows, and sends the arguments that later stages use in it; for a recording that it has
just made, also those of the microbatch, with which the other rank records the model for itself.
Both travel as microbatches, so that a slice has the strides and alignment that it has at its owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from stageline.capturing.inputs import ambient_key
from stageline.errors import BatchError, EdgeError, PeerError
from stageline.running.control.agreement import HELD, WHOLE, Facts
from stageline.running.loss import LossRule
from stageline.running.microbatches import Microbatches, Replicated
from stageline.running.processes import ProcessRunner
from stageline.running.recordings import Chosen, Recordings
from stageline.running.timetable import Purpose
from stageline.torch_private import tree_flatten
from stageline.wording import a_kind

_ARGUMENTS, _TARGETS = 0, 1  # the values that one rank tells another in a call
_DATA = (Tensor, Replicated, np.ndarray)
_COMMON = (Tensor, nn.Parameter, type(None), bool, int, float, str)  # leaves that can be sent


def has_data(*values: Any) -> bool:
    """Whether there is a tensor in some arguments; one of them is one, mostly."""
    if any(isinstance(value, _DATA) for value in values):
        return True
    return any(isinstance(leaf, _DATA) for leaf in tree_flatten(values)[0])


def has_rows(*values: Any) -> bool:
    """Whether there is something in some arguments that may be split into microbatches.

    Example:
        >>> import torch
        >>> has_rows(torch.ones(8, 2)), has_rows(torch.tensor(0.5), Replicated(torch.ones(8, 2)))
        (True, False)
    """
    return any(map(_may_be_split, values)) or any(map(_may_be_split, tree_flatten(values)[0]))


def _may_be_split(value: Any) -> bool:
    return value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, np.ndarray)


class Given(NamedTuple):
    """Whether a rank was given arguments of the model, and a target."""

    arguments: bool
    target: bool

    def __str__(self) -> str:
        names = [
            name
            for name, is_given in (("arguments", self.arguments), ("a target", self.target))
            if is_given
        ]
        return " and ".join(names) or "nothing"


class Settled(NamedTuple):
    """What is settled for calls of one kind.

    Attributes:
        given: What this rank is given.
        lacking: The ranks that lack arguments.
        gives_target: The rank that sends the target to the last rank; None if that has it.
    """

    given: Given
    lacking: tuple[int, ...]
    gives_target: int | None


class Shipping:
    """Brings data to the ranks that were not given it.

    Args:
        runner: This process as one rank of several.
        placement: The rank of each stage.
        recordings: What chooses recordings, where the model was recorded.
        loss_rule: How the last stage makes a loss.
    """

    def __init__(
        self,
        runner: ProcessRunner,
        placement: Sequence[int],
        recordings: Recordings | None,
        loss_rule: LossRule,
    ) -> None:
        self._runner = runner
        self._rank = runner.rank
        self._first, self._last = placement[0], placement[-1]
        self._stages: dict[int, list[int]] = defaultdict(list)
        for stage, rank in enumerate(placement):
            self._stages[rank].append(stage)
        self._recordings = recordings
        self._loss_rule = loss_rule
        self._settled: dict[Purpose, Settled] = {}
        self._new: tuple[Purpose, Settled] | None = None

    # ---- what is settled ---------------------------------------------------------------------

    def look(self, purpose: Purpose, given: Given, batch: Microbatches | None) -> Facts:
        """Return what other ranks must know of the data that this one was given.

        Raises:
            BatchError: It was given other data in the first call of this kind.
        """
        settled = self._settled.get(purpose)
        if settled is None:
            names = [] if batch is None else _argument_names(batch)
            return {HELD: {"arguments": names, "target": given.target}}
        if given != settled.given:
            raise BatchError(
                f"rank {self._rank} was given {given}, but {settled.given} in the first call of "
                f"this kind ({purpose.value}), where it was settled which ranks hold data: give "
                "it the same in every such call, or build another pipeline"
            )
        return {} if batch is None or self._rank in settled.lacking else {WHOLE: True}

    def settle(self, purpose: Purpose, given: Given) -> None:
        """Learn in the first call of a kind what every rank was given.

        Raises:
            BatchError: No rank has what this one needs.
        """
        if purpose in self._settled:
            return
        told = self._runner.agreed_data()
        wanted = told[self._first]["arguments"]
        unknown = [name for name in told[self._rank]["arguments"] if name not in wanted]
        if unknown:
            raise BatchError(
                f"rank {self._rank} was given {unknown[0]}, but rank {self._first}, which holds "
                "stage 0, was not: pass the whole batch there"
            )
        lacking = tuple(r for r in sorted(told) if len(told[r]["arguments"]) < len(wanted))
        gives_target = None
        if self._uses_target(purpose) and not told[self._last]["target"]:
            gives_target = self._giver([rank for rank in sorted(told) if told[rank]["target"]])
        self._new = (purpose, Settled(given, lacking, gives_target))

    def _uses_target(self, purpose: Purpose) -> bool:
        has_loss = purpose in (Purpose.TRAIN, Purpose.EVALUATE)
        return has_loss and self._loss_rule.function is not None

    def _giver(self, having: Sequence[int]) -> int | None:
        """Return the rank that gives the last one the target."""
        if having:
            return having[0]
        if self._rank != self._last:
            return None  # the last rank fails, and so do all
        raise BatchError(
            f"rank {self._last} holds the last stage and needs a target for loss_fn, but no rank "
            "was given one: step(x, target=y)"
        )

    def keep(self) -> None:
        """Keep what was settled and recorded: the call is over, so every rank knows it."""
        if self._new is not None:
            purpose, settled = self._new
            self._settled[purpose] = settled
        self._new = None
        if self._recordings is not None:
            self._recordings.keep()

    def forget(self) -> None:
        """Drop what was settled and recorded in a call that has failed: others may not have it."""
        self._new = None
        if self._recordings is not None:
            self._recordings.forget()

    # ---- what travels ------------------------------------------------------------------------

    def chosen(self, batch: Microbatches, purpose: Purpose) -> Sequence[Chosen]:
        """Return what each microbatch follows; the rank of stage 0 tells ranks without data."""
        recordings = self._recordings
        if recordings is None:
            return ()
        lacking = self._now(purpose).lacking
        builds_graph = purpose.builds_graph
        if self._rank in lacking:
            return self._followed(recordings, batch, builds_graph)
        chosen = recordings.choose(batch, builds_graph=builds_graph)
        if self._rank == self._first and lacking:
            told = _told(recordings, batch, chosen, builds_graph)
            for rank in lacking:
                used = recordings.inputs(self._stages[rank], {each.variant for each in chosen})
                self._tell(batch, rank, _ARGUMENTS, {**told, **_arguments(used, chosen)})
        return chosen

    def _followed(
        self, recordings: Recordings, batch: Microbatches, builds_graph: bool
    ) -> list[Chosen]:
        """Return what the rank of stage 0 has told of each microbatch; record what is new."""
        told = self._runner.hear(self._first, _ARGUMENTS)
        if told["ambient"] != repr(ambient_key()):
            raise PeerError(
                f"rank {self._rank} calls under another autocast than rank {self._first} "
                f"({ambient_key()!r} and {told['ambient']}): use the same on every rank"
            )
        for args, kwargs in told["new"]:
            recordings.record(args, kwargs, told["gradients"], builds_graph=builds_graph)
        recordings.check(told["variants"], told["training"])
        chosen = []
        for variant, values in zip(told["variants"], told["leaves"], strict=True):
            leaves = [None] * told["count"]
            for place, value in zip(told["places"], values, strict=True):
                leaves[place] = value
            chosen.append(Chosen(variant, leaves))
        return chosen

    def deliver_target(self, batch: Microbatches, purpose: Purpose) -> None:
        """Send the target to the last rank, or receive it there."""
        giver = self._now(purpose).gives_target
        if giver is None or self._rank not in (giver, self._last):
            return
        if self._rank == self._last:
            told = self._runner.hear(giver, _TARGETS)
            batch.receive_targets(told["targets"], told["weights"])
            return
        leaves = tree_flatten(batch.whole.target)[0]
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise BatchError(
                f"the target requires a gradient, which cannot come back to rank {self._rank}: "
                f"pass it on rank {self._last}, which holds the last stage, or detach it"
            )
        indices = range(batch.count)
        weights = None
        if callable(self._loss_rule.reduction):
            weights = [self._loss_rule.weight(batch, index) for index in indices]
        targets = [batch.target(index) for index in indices]
        self._tell(batch, self._last, _TARGETS, {"targets": targets, "weights": weights})

    def _now(self, purpose: Purpose) -> Settled:
        return self._settled[purpose] if self._new is None else self._new[1]

    def _tell(self, batch: Microbatches, rank: int, number: int, value: Mapping[str, Any]) -> None:
        try:
            self._runner.tell(rank, number, value)
        except EdgeError as cause:
            leaves = batch.named_leaves()
            strange = [f"{name} is {a_kind(x)}" for name, x in leaves if type(x) not in _COMMON]
            raise BatchError(
                f"rank {rank} lacks a part of the batch, and rank {self._rank} cannot send it what "
                f"it needs ({'; '.join(strange) or cause}). Pass the whole batch on every rank, or "
                "only tensors, numbers, strings, truth values and None"
            ) from cause


def _argument_names(batch: Microbatches) -> list[str]:
    leaves = batch.named_leaves()
    return [name for name, leaf in leaves if leaf is not None and not name.startswith("target")]


def _told(
    recordings: Recordings, batch: Microbatches, chosen: Sequence[Chosen], builds_graph: bool
) -> dict[str, Any]:
    """Return what every rank that lacks arguments must know."""
    variants = [each.variant for each in chosen]
    return {
        "ambient": repr(ambient_key()),
        "variants": variants,
        "training": recordings.flags(variants),
        "new": [batch.inputs(index) for index in recordings.added],
        "gradients": batch.inputs_with_gradient if builds_graph else [],
    }


def _arguments(places: Sequence[int], chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Return the arguments that the stages of a rank use."""
    return {
        "count": max(len(each.leaves) for each in chosen),
        "places": places,
        "leaves": [[each.leaves[place] for place in places] for each in chosen],
    }
