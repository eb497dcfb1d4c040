"""The kinds of input a model is captured on and run with, and what came of one such check."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import stageline as sl
from stageline.capturing.recording import without_cache
from stageline.testing import PlainResult, plain_step
from tests.models.comparing import (
    SEED,
    Run,
    as_loss,
    buffers_of,
    compare,
    gradients_by_every_name,
    gradients_of,
    run,
    tied_names,
)
from tests.models.inputs import Inputs, Maker, Shape

CHECKS_PER_COLLECTION = 10
_checks = count(1)


class Subject(Protocol):
    """A model to check: an entry of the zoo, or one written in local.py."""

    @property
    def name(self) -> str: ...
    @property
    def masks(self) -> bool: ...
    @property
    def other_length(self) -> int | None: ...
    @property
    def pads(self) -> str: ...
    @property
    def computes_loss(self) -> bool: ...
    @property
    def inputs(self) -> Maker: ...
    def build(self, *, dropout: bool = True) -> nn.Module: ...


@dataclass(frozen=True)
class Kind:
    """One way to capture a model and to run it.

    Attributes:
        name: As a column of the table is called.
        seen: What it is captured on.
        given: What it is run with.
        modes: Whether the model is in train mode when captured, and when run.
        needs: ``"mask"`` or ``"length"``: only for models that take one, or several.
    """

    name: str
    seen: Shape
    given: Shape
    modes: tuple[bool, bool] = (True, True)
    needs: str = ""

    def fits(self, entry: Subject) -> bool:
        """Whether a model can be asked this at all."""
        if self.needs == "mask":
            return entry.masks
        return self.needs != "length" or entry.other_length is not None


_FULL, _OTHER, _PADDED = Shape(), Shape(seed=2), Shape(padding="own side")

KINDS: tuple[Kind, ...] = (
    Kind("new data", _FULL, _OTHER),
    Kind("no labels", replace(_FULL, labels=False), replace(_OTHER, labels=False)),
    Kind("batch 3", _FULL, Shape(batch=3, seed=2)),
    Kind("batch 1", _FULL, Shape(batch=1, seed=2)),
    Kind("batch 1 to 4", Shape(batch=1), _OTHER),
    Kind("length", _FULL, Shape(length=0, seed=2), needs="length"),
    Kind("ones to padded", _FULL, _PADDED, needs="mask"),
    Kind("padded to ones", _PADDED, _OTHER, needs="mask"),
    Kind("other padding", _PADDED, replace(_PADDED, seed=2), needs="mask"),
    Kind("other side", _PADDED, Shape(padding="other side", seed=2), needs="mask"),
    Kind(
        "no mask", replace(_FULL, padding="absent"), replace(_OTHER, padding="absent"), needs="mask"
    ),
    Kind("eval", _FULL, _OTHER, modes=(False, False)),
    Kind("train to eval", _FULL, _OTHER, modes=(True, False)),
    Kind("eval to train", _FULL, _OTHER, modes=(False, True)),
)

# Five rows in two microbatches: of three and of two rows, while four were seen.
PIPELINED = Kind("pipelined", _FULL, Shape(batch=5, seed=2))


def inputs_of(entry: Subject, shape: Shape) -> Inputs:
    """Return the inputs of a shape, in the model's own length and on its own side of padding."""
    if shape.padding.endswith("side"):
        flipped = "left" if entry.pads == "right" else "right"
        side = entry.pads if shape.padding == "own side" else flipped
        shape = replace(shape, padding=side)
    if not shape.length:
        assert entry.other_length is not None
        shape = replace(shape, length=entry.other_length)
    inputs = entry.inputs(shape)
    if not entry.masks:
        inputs.pop("attention_mask", None)
    return inputs


@dataclass(frozen=True)
class Outcome:
    """What came of one check.

    Attributes:
        verdict: ``exact``, ``close`` or ``WRONG`` (see comparing.py); ``refused`` if stageline said
            why not; ``crash`` if another error came up; ``no plain`` if the plain model fails too;
        details: What differs, or the lines of the error.
        trace: The traceback of an error.
    """

    verdict: str
    details: Sequence[str] = ()
    trace: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict in ("exact", "close", "no plain")

    def __str__(self) -> str:
        return "\n".join((self.verdict, *self.details[:12], self.trace))


def _tidy() -> None:
    """Collect what earlier checks left in cycles, now and then.

    A capture leaves tens of megabytes in them. Python counts objects, not bytes, and beside the
    many objects of transformers a few thousand are no reason for it to look: hundreds of checks
    in a row have used up all memory of a machine.
    """
    if next(_checks) % CHECKS_PER_COLLECTION == 0:
        gc.collect()


def as_recorded(plain: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs with which a model makes no cache that nobody asked for, as it is recorded.

    A cache lays keys and values out anew. The numbers are the same, but on some processors (an AMD
    EPYC, not an Intel Xeon) attention rounds differently for another layout.
    """
    return {**inputs, **without_cache(plain, inputs)}


def _failed(error: Exception) -> Outcome:
    verdict = "refused" if isinstance(error, sl.StagelineError) else "crash"
    lines = f"{type(error).__name__}: {error}".splitlines()
    return Outcome(verdict, lines, "".join(traceback.format_exception(error)))


def check_plan(entry: Subject, kind: Kind, split: int) -> Outcome:
    """Capture a model, cut it, run all stages one after the other; compare with the plain model."""
    _tidy()
    in_capture, in_run = kind.modes
    seen, given = inputs_of(entry, kind.seen), inputs_of(entry, kind.given)
    plain = entry.build()
    try:
        entry.build().train(in_capture)(**seen)
        want = run(plain.train(in_run), plain, as_recorded(plain, given))
    except (ValueError, RuntimeError, IndexError) as error:
        return Outcome("no plain", [str(error)])
    model = entry.build().train(in_capture)
    try:
        plan = sl.partition(sl.capture(model, (), seen), split=split)
        stages = modules_of(plan)
        assert len(stages) == split
        for part in (model, *stages):
            part.train(in_run)
        got = run(plan.run, model, given)
    except Exception as error:
        return _failed(error)
    return Outcome(*compare(got, want, tied_names(model, stages)))


def check_pipeline(
    entry: Subject, split: int, *, kind: Kind = PIPELINED, transport: str | None = None
) -> Outcome:
    """Run two accumulating steps in train mode, dropout included; compare with the plain model."""
    _tidy()
    inputs = inputs_of(entry, kind.given)
    plain, model = entry.build(), entry.build()
    torch.manual_seed(SEED)  # in every process the one that the plain model draws by
    settings: dict[str, Any] = {"num_microbatches": 2}
    target = None
    if not (kind.given.labels and entry.computes_loss):
        settings["loss_fn"] = _mean_square
        target = torch.zeros(kind.given.batch)  # a loss_fn must be given one, used or not
    try:
        for step in range(2):
            wanted = plain_step(
                plain,
                target=target,
                kwargs=as_recorded(plain, inputs),
                num_threads=1,
                step=step,
                **settings,
            )
    except (ValueError, RuntimeError, IndexError) as error:
        return Outcome("no plain", [str(error)])
    want = _as_run(wanted, plain)
    seen = inputs_of(entry, kind.seen)
    try:
        with closing(
            sl.Pipeline(
                model,
                example_kwargs=seen,
                split=split,
                keep_outputs=True,
                transport=transport,
                timeout=60,
                **settings,
            )
        ) as pipe:
            for _ in range(2):
                result = pipe.step(target=target, **inputs)
            got = _as_run(result, pipe)
    except Exception as error:
        return _failed(error)
    wanted_gradients = gradients_by_every_name(plain)
    # A process holds some of the parameters only: what it holds is compared.
    here = Run(
        want.output,
        {name: wanted_gradients[name] for name in got.gradients},
        {name: want.buffers[name] for name in got.buffers},
    )
    return Outcome(*compare(got, here, _tied(entry, seen, split)))


def _as_run(result: PlainResult | sl.StepResult, holder: nn.Module | sl.Pipeline) -> Run:
    output = {"loss": result.loss, "outputs": result.outputs}
    return Run(output, gradients_of(holder), buffers_of(holder))


def _mean_square(output: Any, target: Tensor) -> Tensor:
    return as_loss(output)


def modules_of(plan: sl.Plan) -> list[nn.Module]:
    """Return the stages that this process holds."""
    return [stage.module for stage in plan.stages if stage.module is not None]


def _tied(entry: Subject, seen: Inputs, split: int) -> set[str]:
    """Return the names of parameters that several stages use, some perhaps in other processes."""
    model = entry.build(dropout=False)
    plan = sl.partition(sl.capture(model, (), seen), split=split)
    tied = tied_names(model, modules_of(plan))
    objects = {id(parameter) for name, parameter in model.named_parameters() if name in tied}
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in objects
    }
