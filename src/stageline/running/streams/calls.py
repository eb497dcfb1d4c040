"""The random streams of a pipeline, and what one call of it gives to its stages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.staged import VariantStage
from stageline.capturing.streams.frames import Frame, Planned, Route, Track, here
from stageline.capturing.streams.keys import ROOT, base_of, inside, number_of
from stageline.capturing.streams.tracking import calls_followed
from stageline.errors import PipeError
from stageline.running.streams.candidates import Candidates, function_may_draw
from stageline.running.streams.compiled import compiled_among, uncompiled
from stageline.running.streams.redirect import REDIRECT
from stageline.running.streams.stand_in import standing_in
from stageline.torch_private import default_generator

_LOSS = inside(ROOT, number_of("loss"), 0)
_BACKWARD = number_of("backward")
_NOTHING: AbstractContextManager[None] = nullcontext()


class Inside:
    """A thread in one microbatch of one stage: its calls are followed, its draws redirected."""

    __slots__ = ("_before", "_track")

    def __init__(self, numbers: Mapping[int, int], frame: Frame, base: int) -> None:
        self._track = Track(numbers, frame, base)

    def __enter__(self) -> None:
        self._before = here.track
        here.track = self._track
        REDIRECT.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __exit__(self, *error: object) -> None:
        REDIRECT.__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        here.track = self._before


class _Seeds:
    """Draws a seed for each call that begins, and counts them, for all pipelines of the process."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def draw(self) -> int:
        """Return a seed from torch's default generator."""
        with self._lock:
            self._count += 1
            return int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    def and_generator(self) -> tuple[int, Tensor]:
        """Return how many were drawn, and the generator's state."""
        with self._lock:
            return self._count, default_generator.get_state()


seeds = _Seeds()


class generator_untouched:  # used like a function
    """Raise if something has drawn from torch's default generator in the meantime.

    Where a pipeline in another thread has drawn its seed meanwhile, what else has cannot be said.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = seeds.and_generator()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        (before, state), (now, found) = self._before, seeds.and_generator()
        if now != before or torch.equal(found, state):
            return
        raise PipeError(
            "during this call something drew from torch's default generator, past the streams that "
            "keep random numbers apart: they would depend on which thread comes first. It was an "
            "operation that stageline does not know (a custom, scripted or compiled one), or "
            "another thread of your program: let it draw from a torch.Generator of its own, "
            "generator=..., or leave the module that draws uncompiled"
        )


@dataclass(frozen=True)
class StageStreams:
    """What is known of a stage.

    Attributes:
        numbers: The numbers of its modules, by identity.
        route: Where in the model its calls lie; None where its own recording knows.
        candidates: Which of its modules may draw.
    """

    numbers: Mapping[int, int]
    route: Route | None
    candidates: Callable[[], Candidates]

    @classmethod
    def of(
        cls, module: nn.Module, original: nn.Module, numbers: Mapping[int, int], route: Route | None
    ) -> StageStreams:
        """Look at a stage: what runs, and what it was before it was wrapped."""
        if not isinstance(original, VariantStage):
            found = Candidates.among(module.modules())
            return cls(numbers, route, lambda: found)
        return cls(original.numbers, None, _Recorded(module, original))


class _Recorded:
    """What may draw in a stage of a recorded model; looks again when there is a new recording."""

    def __init__(self, module: nn.Module, stage: VariantStage) -> None:
        self._module = module
        self._stage = stage
        self._seen = -1
        self._found = Candidates()

    def __call__(self) -> Candidates:
        if self._stage.num_changes != self._seen:
            self._seen = self._stage.num_changes
            inner = [module for module in self._module.modules() if module is not self._stage]
            self._found = Candidates.among(inner, certain=self._stage.draws)
        return self._found


@dataclass(frozen=True)
class CallStreams:
    """The streams of one call.

    Attributes:
        stages: The stages that may draw in it.
        loss_draws: Whether its loss may.
        compiled: The compiled modules of all stages, which run uncompiled meanwhile.
    """

    stages: Mapping[int, StageStreams]
    loss_draws: bool
    seed: int
    kind: str
    number: int
    compiled: Sequence[nn.Module] = ()
    _bases: dict[int, int] = field(default_factory=dict)

    def _base(self, microbatch: int) -> int:
        base = self._bases.get(microbatch)
        if base is None:
            base = base_of(self.seed, number_of(self.kind), self.number, microbatch)
            self._bases[microbatch] = base
        return base

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace what is replaced in torch while threads are inside these streams."""
        with calls_followed(), standing_in(), uncompiled(self.compiled):
            yield

    def follows(self, stage: int) -> bool:
        """Whether calls of modules in a stage must be seen."""
        return stage in self.stages

    def forward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return what to run a stage in."""
        streams = self.stages.get(stage)
        if streams is None:
            return _NOTHING
        frame = Frame.at(ROOT) if streams.route is None else Planned(streams.route)
        return Inside(streams.numbers, frame, self._base(microbatch))

    def loss(self, microbatch: int) -> AbstractContextManager[None]:
        """Return what to compute the loss in."""
        if not self.loss_draws:
            return _NOTHING
        return Inside({}, Frame.at(_LOSS), self._base(microbatch))

    def backward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return what to differentiate a stage in: checkpoints compute again there.

        What backward draws of its own accord gets keys that depend on the stage.
        """
        streams = self.stages.get(stage)
        if streams is None and not self.loss_draws:
            return _NOTHING
        numbers = {} if streams is None else streams.numbers
        return Inside(numbers, Frame.at(inside(ROOT, _BACKWARD, stage)), self._base(microbatch))


class Streams:
    """The random streams of a pipeline.

    Attributes:
        completed: How many calls of each kind it has completed.

    Args:
        stages: The stages of this process.
        loss_fn: The loss function.
        may_draw: Whether anything in the pipeline may draw, here or in another process.
    """

    def __init__(
        self,
        stages: Mapping[int, StageStreams],
        loss_fn: Callable[..., Any] | None,
        *,
        may_draw: bool,
    ) -> None:
        self._stages = stages
        self._loss_fn = loss_fn
        self.may_draw = may_draw
        self.completed = Counter[str]()

    def draws_now(self) -> bool:
        """Whether a stage here draws in a call that begins now, or may."""
        return self.may_draw and any(each.candidates().may_draw() for each in self._stages.values())

    def of_call(self, kind: str, seed: Callable[[], int], number: int) -> CallStreams | None:
        """Return the streams of one call; None if nothing in it can draw, and no seed is asked for.

        Compiled code cannot be followed. It runs uncompiled if something is known to draw; else it
        stays compiled, and what draws all the same is found by ``generator_untouched``.
        """
        found = {index: stage.candidates() for index, stage in self._stages.items()}
        compiled = compiled_among(m for each in found.values() for m in each.modules)
        if compiled and not any(each.draws() for each in found.values()):
            return None
        drawing = {i: self._stages[i] for i, each in found.items() if each.may_draw()}
        loss_draws = function_may_draw(self._loss_fn)
        if not drawing and not loss_draws:
            return None
        return CallStreams(drawing, loss_draws, seed(), kind, number, compiled)
