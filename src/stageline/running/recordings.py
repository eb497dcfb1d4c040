"""Which recording of the model each microbatch follows; chosen before anything runs.

A recording that is missing is made here, in the caller's thread: stages that run in threads of
their own would all have to wait for it in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stageline.capturing.inputs import Arguments
from stageline.capturing.staged import StagedModel
from stageline.errors import PeerError
from stageline.running.microbatches import Microbatches
from stageline.torch_private import tree_flatten


class Chosen(NamedTuple):
    """What one microbatch follows.

    Attributes:
        variant: The name of the recording.
        leaves: The arguments of the model, flat; None where this rank needs none.
    """

    variant: str
    leaves: list[Any]


class Recordings:
    """The recordings of a pipeline's model.

    Args:
        staged: The recorded model.

    Attributes:
        added: The microbatches of the latest call for which a recording was made.
    """

    def __init__(self, staged: StagedModel) -> None:
        self._staged = staged
        self._kept = len(staged.variants)
        self.added: list[int] = []

    @property
    def takes_inputs(self) -> bool:
        """Whether some stage here uses arguments of the model."""
        return any(stage.takes_inputs for stage in self._staged.held.values())

    @property
    def opened(self) -> Iterable[nn.Module]:
        """The modules that were cut open and are in no stage."""
        return self._staged.flags.modules

    def train(self, mode: bool) -> None:
        """Follow the pipeline's train() and eval() in code that no stage contains."""
        self._staged.flags.train_all(mode)

    def choose(self, batch: Microbatches, *, builds_graph: bool) -> list[Chosen]:
        """Return what each microbatch follows; record what was not seen before.

        A microbatch that looks like the one before follows the same, unless some decision goes by
        what is in the tensors.
        """
        self._staged.look_at_model()
        self.added = []
        flags = batch.inputs_with_gradient if builds_graph else []
        # As it will run: a model may decide by whether gradients are asked for.
        if torch.is_grad_enabled() is builds_graph:
            return self._choose(batch, flags)
        with torch.set_grad_enabled(builds_graph):
            return self._choose(batch, flags)

    def _choose(self, batch: Microbatches, flags: Sequence[bool]) -> list[Chosen]:
        found: list[Chosen] = []
        variant, decided = "", 0  # what microbatches of a size follow that is decided
        for index, size in enumerate(batch.sizes):
            args, kwargs = batch.inputs(index)
            if size == decided:
                found.append(Chosen(variant, [*args, *kwargs.values()]))
                continue
            count = len(self._staged.variants)
            chosen, goes_by_looks = self._chosen(args, kwargs, flags)
            if len(self._staged.variants) > count:
                self.added.append(index)
            variant = chosen.variant
            decided = size if goes_by_looks and batch.inputs_look_alike else 0
            found.append(chosen)
        return found

    def _chosen(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], flags: Sequence[bool]
    ) -> tuple[Chosen, bool]:
        """Return what a microbatch follows, and whether all do that look like it."""
        # Flags are those of the leaves as torch alone sees them.
        given = Arguments(*tree_flatten((args, kwargs))) if flags else Arguments.of(args, kwargs)
        asked = given
        if flags:
            wanting = [
                leaf.detach().requires_grad_() if flag else leaf
                for leaf, flag in zip(given.leaves, flags, strict=True)
            ]
            asked = Arguments.of(*given.with_leaves(wanting).unpacked())
        variant, goes_by_looks = self._staged.choice(asked)
        return Chosen(variant, given.leaves), goes_by_looks

    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flags: Sequence[bool],
        *,
        builds_graph: bool,
    ) -> None:
        """Record what another rank has recorded for these arguments of a microbatch."""
        self._staged.look_at_model()
        with torch.set_grad_enabled(builds_graph):
            self._chosen(args, kwargs, flags)

    def flags(self, variants: Iterable[str]) -> dict[str, bool]:
        """Return the training flags that some recordings go by, by the name of their module."""
        wanted = set(variants)
        return {
            path: variant.recording.names.module(path).training
            for variant in self._staged.variants
            if variant.name in wanted
            for _, path in variant.recording.flags
        }

    def check(self, variants: Sequence[str], flags: Mapping[str, bool]) -> None:
        """Raise unless recordings that another rank has chosen would do here too.

        Args:
            variants: The recordings.
            flags: The training flags that they go by, as they are there.

        Raises:
            PeerError: The model is in another state here.
        """
        self._staged.look_at_model()
        if not self._staged.holds_now(variants) or self.flags(variants) != flags:
            raise PeerError(
                "the model does something else on this rank than on the rank that was given the "
                "batch: set train() or eval(), autocast, and what the model's code decides by, to "
                "the same on every rank"
            )

    def inputs(self, stages: Collection[int], variants: Collection[str]) -> list[int]:
        """Return the places of the arguments that stages use in some recordings."""
        return sorted(
            {
                place
                for variant in self._staged.variants
                if variant.name in variants
                for stage in stages
                for place in variant.codes[stage].inputs
            }
        )

    def keep(self) -> None:
        """Keep what was recorded: every rank has it by now."""
        self._kept = len(self._staged.variants)

    def forget(self) -> None:
        """Drop what was recorded in a call that has failed: other ranks may not have it."""
        self._staged.forget(self._staged.variants[self._kept :])
