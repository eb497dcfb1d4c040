"""What all schedules do: build a pipeline from stages, and run batches on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stageline import log
from stageline.compat.pippy.microbatch import (
    active_specs,
    batch_dims,
    merge_chunks,
    replicated,
    split_args_kwargs_into_chunks,
)
from stageline.compat.pippy.replicas import averaged, without_replicas
from stageline.compat.pippy.stage import PipelineStage
from stageline.pipeline import Pipeline
from stageline.running.current import current_microbatch
from stageline.running.microbatches import LossWeight
from stageline.running.shipping import has_data
from stageline.running.world import World
from stageline.scheduling import Schedule, schedules

_said: set[str] = set()  # notes that this process has read


class AnySchedule:
    """Runs batches on stages; the base of all schedules.

    Every process of the pipeline makes the same schedule, with the stages that it holds. A process
    alone gives all stages, which then run as threads.

    Example:
        >>> from stageline.compat.pippy import ScheduleGPipe
        >>> stages = [PipelineStage(nn.Linear(4, 4), i, 2, "cpu") for i in range(2)]
        >>> schedule = ScheduleGPipe(stages, 2, loss_fn=nn.MSELoss())
        >>> losses = []
        >>> schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=losses).shape
        torch.Size([4, 4])
        >>> len(losses), stages[0].submod.weight.grad is None
        (2, False)

    Args:
        stages: The stage of this process, or a list of them.
        n_microbatches: Into how many microbatches a batch is cut.
        loss_fn: ``(output, target) -> loss``; without it the schedule only runs forward.
        args_chunk_spec: How positional arguments are cut; along dimension 0 if left out.
        kwargs_chunk_spec: The same for keyword arguments.
        output_merge_spec: How the outputs of the microbatches are joined.
        scale_grads: Whether gradients are those of the mean over the batch (the loss_fn is a mean),
            or of the sum (it is a sum); or ``(microbatch, batch) -> weight``, such as a share of
            tokens. Left out it is True, as in torch.
        backward_requires_autograd: Not needed, accepted.
        defer_pp_recv: Not needed, accepted: a receipt never delays a computation.
        use_full_backward: Not needed, accepted.

    Attributes:
        pipeline: The ``sl.Pipeline`` that runs.
        has_backward: Whether there is a loss, and with it a backward.
    """

    family: ClassVar[str | None] = None
    _holds: ClassVar[int | None] = None  # stages per rank, where the schedule wants a number

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool | LossWeight | None = None,
        *,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        use_full_backward: bool | None = None,
    ) -> None:
        self._stages = self._checked(stages)
        self._n_microbatches = n_microbatches
        # Its keywords change from step to step (loss_kwargs); the function stays the same one.
        self._loss_fn = None if loss_fn is None else partial(loss_fn)
        self.scale_grads = True if scale_grads is None else scale_grads
        self._pipe = self._stages[0].pipe
        is_pippys = self._pipe is not None and self._pipe.num_chunks is not None
        if is_pippys and scale_grads is None and loss_fn is not None:
            self._say_once(
                "PiPPy did not scale gradients, here they are those of the mean over the batch: "
                "pass scale_grads=False if loss_fn is a sum, else True"
            )
        self._specs = self._chunk_specs(args_chunk_spec, kwargs_chunk_spec)
        self._merge_spec = output_merge_spec
        if self._merge_spec is None and self._pipe is not None:
            self._merge_spec = self._pipe.output_chunk_spec
        self._given = _Given()
        for stage in self._stages:
            stage.schedule = self
        self._check()
        self._pipeline: Pipeline | None = None
        if self.family is not None:  # here, as every rank comes here: building is collective
            self._pipeline = self._built(self.family)

    @property
    def pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError(
                f"{type(self).__name__} has no order of its own: load one with _load_csv(file), or "
                "use another class, such as ScheduleInterleaved1F1B"
            )
        return self._pipeline

    @property
    def has_backward(self) -> bool:
        return self._loss_fn is not None

    def _chunk_specs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return how arguments are cut: as said here, around this call, or for the Pipe."""
        of_args, of_kwargs = active_specs()
        if self._pipe is not None:
            of_args = of_args or self._pipe.args_chunk_spec
            of_kwargs = of_kwargs or self._pipe.kwargs_chunk_spec
        return args or of_args, kwargs or of_kwargs

    # ---- building ----------------------------------------------------------------------------

    def _checked(self, stages: Any) -> list[PipelineStage]:
        given = list(stages) if isinstance(stages, Sequence) else [stages]
        others = [type(each).__name__ for each in given if not isinstance(each, PipelineStage)]
        if others or not given:
            raise TypeError(
                f"{type(self).__name__}: wanted a PipelineStage or a list of them, got "
                f"{', '.join(others) or 'an empty list'}: each process gives the stages that it "
                "holds, at least one"
            )
        return given

    def _check(self) -> None:
        first = self._stages[0]
        name = type(self).__name__
        if any((s.pipe, s.num_stages) != (first.pipe, first.num_stages) for s in self._stages):
            raise ValueError(f"{name}: the stages belong to different pipelines")
        # What fully_shard makes of a parameter has this method.
        sharded = [
            s.stage_index for s in self._stages for p in s.parameters() if hasattr(p, "full_tensor")
        ]
        if sharded:
            raise ValueError(
                f"{name}: fully_shard has split the parameters of stage {sharded[0]}, which is not "
                "possible here: replicate stages with DistributedDataParallel"
            )
        if self._holds is not None and self._world is not None and len(self._stages) != self._holds:
            raise ValueError(
                f"{name} requires exactly {self._holds} stages per rank, but got "
                f"{len(self._stages)}."
            )
        if self._world is None and len(self._stages) != first.num_stages:
            given = ", ".join(str(stage.stage_index) for stage in self._stages)
            raise ValueError(
                f"{name}: this process is alone and was given stage {given} of "
                f"{first.num_stages}: give it all stages, or start the script with torchrun"
            )

    @property
    def _world(self) -> World | None:
        return World.find(self._stages[0].group)

    def _num_ranks(self, schedule: str | Schedule) -> int:
        if self._world is not None:
            return self._world.size
        if isinstance(schedule, Schedule):
            return schedule.num_ranks
        if dist.is_initialized():
            return 1
        return schedules.family(schedule).num_ranks(self._stages[0].num_stages)

    def _built(self, schedule: str | Schedule) -> Pipeline:
        """Build the pipeline, together with the other processes."""
        first, world = self._stages[0], self._world
        ranks = self._num_ranks(schedule)
        placement = self._placement(schedule, ranks)
        rank = 0 if world is None else world.rank
        held = [i for i, r in enumerate(placement) if world is None or r == rank]
        if sorted(stage.stage_index for stage in self._stages) != held:
            given = [stage.stage_index for stage in self._stages]
            raise ValueError(
                f"{type(self).__name__} holds stages {held} on rank {rank}, got {given}"
            )
        here = {placement[stage.stage_index]: stage.device for stage in self._stages}
        devices = [_plain(here.get(each, first.device)) for each in range(ranks)]
        scale: Any = self.scale_grads
        settings: dict[str, Any] = {
            "num_microbatches": self._n_microbatches,
            "schedule": schedule,
            "loss_fn": self._loss_fn,
            "loss_reduction": {True: "mean", False: "sum"}.get(scale, scale),
            "keep_outputs": True,
            "share_outputs": False,
            "original_errors": True,
            "ranks": ranks,
            "devices": devices,
            "batch_dims": batch_dims(*self._specs) or 0,
            "group": first.group,
        }
        if self._merge_spec is not None:
            settings["merge_outputs"] = lambda parts, _: merge_chunks(parts, self._merge_spec)
        if first.pipe is not None:
            first.pipe.check_shared()
            return Pipeline(plan=first.pipe.plan, **settings)
        if world is not None:
            self._say_once(
                "PipelineStage(module, ...) knows the modules of its own rank only: a parameter "
                "that ranks share gets a part of its gradient on each. pipeline(model, ...) finds "
                "shared parameters and gives each its whole gradient."
            )
        return Pipeline.from_stages(
            {stage.stage_index: _WithKeywords(stage, self._given) for stage in self._stages},
            num_stages=first.num_stages,
            unpack_tuples=True,
            **settings,
        )

    def _placement(self, schedule: str | Schedule, ranks: int) -> tuple[int, ...]:
        if isinstance(schedule, Schedule):
            return schedule.placement
        stages = self._stages[0].num_stages
        built = schedules.build(schedule, stages, self._n_microbatches, num_ranks=ranks)
        return built.placement

    # ---- running -----------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward and backward; gradients are accumulated.

        Args:
            args: The arguments of the model, on the rank of stage 0.
            target: What the loss compares with, on the rank of the last stage.
            losses: Is given the loss of each microbatch, on the rank of the last stage.
            return_outputs: Whether that rank returns the output of the batch.
            loss_kwargs: Further keyword arguments of the loss.
            kwargs: Keyword arguments: of the model if it was cut by ``pipeline``, else of the
                modules of this rank.
        """
        if self.has_backward and not torch.is_grad_enabled():
            raise RuntimeError(
                "step() requires gradients to be enabled for backward computation; it should not "
                "be used under torch.no_grad() context. Please call eval() instead."
            )
        self.pipeline.keep_outputs = return_outputs
        trained = self._stages if self.has_backward else []
        with averaged([stage.submod for stage in trained]):
            output = self._run(args, kwargs, target, losses, loss_kwargs)
            for stage in trained:
                if stage.dw_builder is not None:
                    for _ in range(self._num_run):
                        stage.dw_builder()()
        return output if return_outputs else None

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward, with its loss and without gradients; no module changes its mode."""
        self.pipeline.keep_outputs = return_outputs
        with torch.no_grad():
            output = self._run(args, kwargs, target, losses, loss_kwargs)
        return output if return_outputs else None

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list but got a {type(losses)}")
        is_first = any(stage.is_first for stage in self._stages)
        args = replicated(args, self._specs[0]) if is_first else ()
        if self._loss_fn is not None:
            self._loss_fn.keywords.clear()
            self._loss_fn.keywords.update(loss_kwargs or {})
        with self._keywords_given(args, kwargs) as of_model:
            if self._loss_fn is None:
                with torch.no_grad():
                    output = self.pipeline(*args, **of_model)
                return output if self._is_last else None
            result = self.pipeline.step(*args, target=target, **of_model)
        self._num_run = result.num_microbatches
        if self._is_last and losses is not None:
            losses[:] = result.microbatch_losses
        return result.outputs if self._is_last else None

    def _say_once(self, note: str) -> None:
        if self._stages[0].group_rank == 0 and note not in _said:
            _said.add(note)
            log.warning(0, note)

    @property
    def _is_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    @contextmanager
    def _keywords_given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Give the modules of this rank their keyword arguments; yield those of the pipeline.

        A Pipe knows which stage uses which. Modules that the caller has cut get all of them, each
        rank its own, cut into microbatches without regard to the rows of other arguments.
        """
        of_pipeline = replicated(kwargs, self._specs[1])
        if self._pipe is not None or not kwargs:
            yield of_pipeline
            return
        is_first = any(stage.is_first for stage in self._stages)
        if not is_first or has_data(args):
            of_pipeline = {}
        _, parts = split_args_kwargs_into_chunks(
            (), kwargs, self._n_microbatches, None, self._specs[1]
        )
        self._given.keywords = parts
        try:
            yield of_pipeline
        finally:
            self._given.keywords = None


class _Given:
    """The keyword arguments of the modules of this rank, one entry for each microbatch."""

    keywords: Sequence[Mapping[str, Any]] | None = None


class _WithKeywords(nn.Module):
    """Calls a module with what the stage before made, and with this rank's keyword arguments."""

    draws_nothing = True  # no random numbers; the module answers for itself

    def __init__(self, stage: PipelineStage, given: _Given) -> None:
        super().__init__()
        self.submod = without_replicas(stage.submod)
        self.given = given
        self.is_last = stage.is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts, microbatch = self.given.keywords, current_microbatch()
        if parts is not None and microbatch is not None and not kwargs:
            kwargs = dict(parts[microbatch])
        output = self.submod(*args, **kwargs)
        # The values of a list are arguments of the next stage too, as those of a tuple are.
        return tuple(output) if isinstance(output, list) and not self.is_last else output


def _plain(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cpu" else device
