"""Which recording of the model each microbatch follows; chosen before anything runs.

A recording that is missing is made here, in the caller's thread: stages that run in threads of
their own would all have to wait for it in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stageline.capturing.inputs import Arguments
from stageline.capturing.staged import StagedModel, VariantStage
from stageline.errors import BatchError
from stageline.running.microbatches import Microbatches
from stageline.torch_private import tree_flatten


class Chosen(NamedTuple):
    """What one microbatch follows.

    Attributes:
        variant: The name of the recording; None where only the stage before knows it.
        leaves: The arguments of the model, flat.
    """

    variant: str | None
    leaves: list[Any]


class Recordings:
    """The recordings of a pipeline's model.

    Args:
        staged: The recorded model.
        is_first: Whether stage 0 lives here; it says which recording a microbatch follows.
    """

    def __init__(self, staged: StagedModel, *, is_first: bool) -> None:
        self._staged = staged
        self._is_first = is_first

    @property
    def takes_inputs(self) -> bool:
        """Whether some stage here uses arguments of the model."""
        return any(stage.takes_inputs for stage in self._staged.held.values())

    @property
    def opened(self) -> Iterable[nn.Module]:
        """The modules that were cut open and are in no stage."""
        return self._staged.modes.values()

    def train(self, mode: bool) -> None:
        """Follow the pipeline's train() and eval() in code that no stage contains."""
        self._staged.train(mode)

    def choose(self, batch: Microbatches, *, builds_graph: bool) -> list[Chosen]:
        """Return what each microbatch follows; record what was not seen before.

        A microbatch that looks like the one before follows the same, unless some decision goes by
        what is in the tensors.
        """
        self._staged.look_at_model()
        flags = batch.inputs_with_gradient if builds_graph else []
        # As it will run: a model may decide by whether gradients are asked for.
        if torch.is_grad_enabled() is builds_graph:
            return self._choose(batch, flags)
        with torch.set_grad_enabled(builds_graph):
            return self._choose(batch, flags)

    def _choose(self, batch: Microbatches, flags: Sequence[bool]) -> list[Chosen]:
        found: list[Chosen] = []
        variant, decided = None, 0  # what microbatches of a size follow that is decided
        for index, size in enumerate(batch.sizes):
            args, kwargs = batch.inputs(index)
            if size == decided:
                found.append(Chosen(variant, [*args, *kwargs.values()]))
                continue
            chosen, goes_by_looks = self._chosen(args, kwargs, flags)
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
        if not self._is_first and not self._is_whole(given.leaves):
            self._check(given.leaves)
            return Chosen(None, given.leaves), True
        asked = given
        if flags:
            wanting = [
                leaf.detach().requires_grad_() if flag else leaf
                for leaf, flag in zip(given.leaves, flags, strict=True)
            ]
            asked = Arguments.of(*given.with_leaves(wanting).unpacked())
        variant, goes_by_looks = self._staged.choice(asked)
        return Chosen(variant, given.leaves), goes_by_looks

    def _is_whole(self, leaves: list[Any]) -> bool:
        """Whether a rank was given all that the model was recorded with."""
        first = self._staged.variants[0].recording
        return all(place < len(leaves) and leaves[place] is not None for place in first.inputs)

    def _check(self, leaves: list[Any]) -> None:
        """Raise if a stage here uses an argument that this rank was not given."""
        for index, stage in self._staged.held.items():
            missing = _missing(stage, leaves)
            if missing:
                raise BatchError(
                    f"stage {index} uses the model's arguments {', '.join(missing)}, but this rank "
                    "was not given them: pass the whole batch on every rank"
                )


def _missing(stage: VariantStage, leaves: list[Any]) -> list[str]:
    return [name for place, name in stage.inputs() if place >= len(leaves) or leaves[place] is None]
