"""The object a user holds: connects the rooms, contains no logic of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stageline.errors import ConfigError
from stageline.partitioning.plan import Plan
from stageline.partitioning.recorded import CutModel, Example, cut_any, cut_by_plan
from stageline.partitioning.sharing import find_shared
from stageline.partitioning.sources import StageLike, held_modules, read_stages
from stageline.partitioning.splits import Split
from stageline.partitioning.weighing import Balance
from stageline.planning import Proposal
from stageline.planning.adopting import adopt
from stageline.running import assembly, differentiable
from stageline.running.building import Builders
from stageline.running.engine import Engine
from stageline.running.events import Observer
from stageline.running.foreign import ForeignParameters
from stageline.running.loss import LossFunction, LossRule
from stageline.running.materialising import InitStage
from stageline.running.merging import MergeOutputs
from stageline.running.merging import merge_outputs as merge
from stageline.running.microbatches import BatchDims, LossReduction
from stageline.running.names import all_names
from stageline.running.result import StepResult
from stageline.running.runner import ThreadRunner
from stageline.running.settings import Settings, WrapStage
from stageline.running.sizes import MicrobatchSizes
from stageline.running.stages import LoadedKeys
from stageline.running.timetable import Purpose
from stageline.running.transports.base import ThreadTransport
from stageline.running.undoing import Undo
from stageline.scheduling import Schedule
from stageline.scheduling.recompute import Recompute


class Pipeline:
    """A model cut into stages that run as a pipeline, with the plain model's gradients.

    Example:
        >>> import stageline as sl
        >>> _ = torch.manual_seed(0)  # under torchrun, every rank draws the same batch
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> pipe = sl.Pipeline(
        ...     model, split=2, num_microbatches=4, loss_fn=nn.functional.cross_entropy
        ... )
        >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        >>> result = pipe.step(torch.randn(32, 8), target=torch.randint(4, (32,)))
        >>> optimizer.step(); optimizer.zero_grad()
        >>> pipe(torch.randn(5, 8)).shape
        torch.Size([5, 4])

    Under ``python`` every rank is a thread of the process; under ``torchrun`` every process is a
    rank. The script is the same.

    A pipeline begins in train mode: ``step`` computes gradients. Building it changes the mode of no
    module, so that a model in eval mode computes as it would alone, without dropout; ``train()``
    and ``eval()`` change the pipeline and all its modules.

    Args:
        model: Any module. It is run once on the example and recorded; an ``nn.Sequential`` is cut
            between its children without that.
        example_args: The arguments of one call, a few rows; not needed for an ``nn.Sequential``.
        example_kwargs: Its keyword arguments.
        split: Where to cut: a number of stages (4), blocks per stage ([2, 1]), modules at which
            stages begin (["layers.4"]), modules after or before each call of which to cut
            ({"block": "end"}), named blocks ([["B1", "B2"], ["B3"]]) or "marks". Left out, there
            is one stage per process that torchrun started.
        balance: What a number of stages makes even: estimated "time", "memory" or "parameters".
        memory_limit: What a rank has for weights and what the schedule keeps: bytes, or "16GiB".
        plan: A plan of ``sl.partition``, instead of the model, the example and the split; or a
            proposal of ``sl.find_plans``, which has schedule and microbatches too.
        num_microbatches: How many microbatches a batch is cut into; 4 per rank if left out. A
            batch with fewer rows is cut into single rows.
        schedule: A name, such as ``"1f1b"`` (which it is if left out; ``sl.schedules.NAMES``), a
            ``Schedule``, or one in text form. ``"auto"`` searches for one with the estimated times
            of the stages that holds as many activations as 1F1B.
        loss_fn: ``(output, target) -> scalar``; None when the model returns its own loss.
        loss_reduction: ``"mean"``, ``"sum"``, or ``(microbatch, batch) -> weight``.
        recompute: Activation checkpointing: ``"never"``, ``"always"``, ``"except_last"`` (every
            microbatch but the last), ``"waiting"`` (where activations would wait for their
            backward), a list of stages, or ``(stage, microbatch) -> bool``. What is recomputed
            keeps its input alone, and runs again before its backward.
        ranks: How many ranks; one per stage if left out, under torchrun the number of processes.
        devices: One per rank; accelerators if there are any, else the CPU.
        wrap_stage: ``(module, index) -> module``, called before any optimizer can exist: DDP,
            torch.compile.
        init_stage: ``(module, index)``, for a model on meta: sets the weights of a stage of this
            process, instead of the modules' own ``reset_parameters``.
        batch_dims: The batch dimension of all tensors, or by leaf: ``{"args[0]": 1, "output": 1}``.
        microbatch_sizes: ``(rows, num_microbatches) -> list`` with the rows of each microbatch; as
            ``torch.tensor_split`` cuts if left out.
        merge_outputs: ``(outputs of the microbatches, their rows) -> output of the batch``;
            concatenates leaf by leaf if left out.
        original_errors: Whether an exception in a stage or loss leaves a call as itself, and not
            as the cause of a ``StepError`` that names rank, stage and microbatch.
        transport: ``"memory"`` (threads of this process), ``"shared-memory"`` (processes of one
            host), ``"process-group"`` (gloo, any number of hosts) or a transport; chosen
            automatically if left out.
        keep_outputs: Whether ``step`` returns the outputs of the batch beside its loss.
        share_outputs: Whether outputs reach every process, or stay on that of the last stage.
        deferred_batch_norm: Whether every BatchNorm updates its running statistics once, when the
            call has ended, with those of the whole batch; it normalises by microbatch all the same.
        timeout: Seconds to wait for another process to build its part of the pipeline.
        heartbeat_timeout: Seconds without a sign of life after which a process counts as dead. One
            that is alive and slow is waited for.
        observer: Called with an ``ActionDone`` after each action, in the thread of its rank.
        group: The processes that hold the pipeline, where they are not all of the job: what
            ``torch.distributed.new_group`` returns. Ranks are then those in the group.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        example_args: tuple[Any, ...] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        split: Split | None = None,
        balance: Balance = "time",
        memory_limit: int | str | None = None,
        plan: Plan | Proposal | None = None,
        num_microbatches: int | None = None,
        schedule: str | Schedule | None = None,
        loss_fn: LossFunction | None = None,
        loss_reduction: LossReduction = "mean",
        recompute: Recompute = "never",
        ranks: int | None = None,
        devices: Sequence[str | torch.device] | None = None,
        wrap_stage: WrapStage | None = None,
        init_stage: InitStage | None = None,
        batch_dims: BatchDims = 0,
        microbatch_sizes: MicrobatchSizes | None = None,
        merge_outputs: MergeOutputs | None = None,
        original_errors: bool = False,
        transport: str | ThreadTransport | None = None,
        keep_outputs: bool = False,
        share_outputs: bool = True,
        deferred_batch_norm: bool = False,
        timeout: float = 1800.0,
        heartbeat_timeout: float = 30.0,
        observer: Observer | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        adopted, contradictions = adopt(plan, schedule, num_microbatches, recompute)
        plan, schedule, num_microbatches, recompute = adopted
        if ranks is None and isinstance(plan, Plan):
            ranks = max(plan.placement) + 1
        settings = Settings(
            num_microbatches=num_microbatches,
            schedule="1f1b" if schedule is None else schedule,
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            recompute=recompute,
            ranks=ranks,
            devices=devices,
            wrap_stage=wrap_stage,
            init_stage=init_stage,
            batch_dims=batch_dims,
            microbatch_sizes=microbatch_sizes,
            merge_outputs=merge_outputs,
            original_errors=original_errors,
            transport=transport,
            keep_outputs=keep_outputs,
            share_outputs=share_outputs,
            deferred_batch_norm=deferred_batch_norm,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            observer=observer,
            group=group,
        )
        example = Example(example_args, example_kwargs, balance, memory_limit, settings.budget())
        asked = {"split": repr(split), "balance": balance, "memory_limit": str(memory_limit)}
        builders = Builders(settings.join(settings.world()), asked)
        with builders.together():
            if plan is not None:
                cut, faults = cut_by_plan(plan, model, split, example)
            else:
                wanted = settings.default_split() if split is None else split
                cut, faults = cut_any(model, wanted, example, builders.decide)
            self._assemble("sl.Pipeline", cut, settings, contradictions + faults, builders)

    @classmethod
    def from_stages(
        cls,
        stages: Sequence[StageLike | None] | Mapping[int, StageLike],
        *,
        num_stages: int | None = None,
        unpack_tuples: bool = False,
        **settings: Any,
    ) -> Pipeline:
        """Build a pipeline from stages that you made yourself: modules, or functions.

        Each stage is called with what the one before returned, the first one with the arguments of
        ``step``. Parameters are named as in ``nn.Sequential(*stages)``: ``1.weight``. One that
        several stages use is tied. Under torchrun it is found only if every process is given all
        stages: who has only his own cannot see what he shares with others.

        Example:
            >>> pipe = Pipeline.from_stages([nn.Linear(4, 4), torch.relu, nn.Linear(4, 1)])
            >>> [name for name, _ in pipe.named_parameters()]
            ['0.weight', '0.bias', '2.weight', '2.bias']

        Args:
            stages: All stages in forward order; under torchrun None may stand for those of other
                processes, or a mapping ``{index: stage}`` names only this process's, together with
                ``num_stages``.
            num_stages: How many stages there are in all; needed with a mapping.
            unpack_tuples: Whether a tuple that a stage returns becomes several arguments of the
                next.
            settings: All other keyword arguments of ``Pipeline``, from ``num_microbatches`` on.
        """
        unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
        if unknown:
            raise TypeError(f"from_stages() got an unexpected keyword argument {unknown[0]!r}")
        said = Settings(**settings, unpack_tuples=unpack_tuples)
        builders = Builders(said.join(said.world()))
        with builders.together():
            sources, faults = read_stages(stages, num_stages)
            pipe = cls.__new__(cls)
            what = "sl.Pipeline.from_stages"
            pipe._assemble(what, CutModel(sources), said, faults, builders)
        return pipe

    def _assemble(
        self,
        what: str,
        cut: CutModel,
        settings: Settings,
        faults: list[str],
        builders: Builders,
    ) -> None:
        """Check everything and report all faults at once; then build plan and engine."""
        world, sources = settings.world(), cut.sources
        shared, shared_faults = find_shared(held_modules(sources))
        faults = [*faults, *shared_faults, *settings.find_faults()]
        parts = None
        if sources:
            parts, more = assembly.fit(sources, settings, world, settings_are_right=not faults)
            faults += more
        if faults or parts is None:
            raise ConfigError(what, faults)
        is_made = assembly.materialise(cut, parts, settings.init_stage, what)
        if is_made:
            shared, _ = find_shared(held_modules(cut.sources))  # the tensors are others now

        self._settings = settings
        self.training = True
        ties = assembly.tie(shared, parts)
        names = all_names(sources, shared, parts.stages_here, cut.aliases, cut.first_names)
        names = replace(names, order=cut.order())
        self._stages = assembly.hold(sources, parts, ties, settings.wrap_stage, what, names)
        self.plan = assembly.describe(cut, self._stages, parts)
        self.devices = tuple(parts.devices)
        self._engine = Engine(
            programs=assembly.programs(self._stages, parts, settings.unpack_tuples),
            timetable=parts.timetable,
            runner=assembly.runner_for(
                sources, shared, settings, builders, parts, has_drawn=is_made
            ),
            loss_rule=LossRule(settings.loss_fn, settings.loss_reduction),
            batch_dims=settings.batch_dims,
            sizes=settings.microbatch_sizes,
            merge=settings.merge_outputs or partial(merge, batch_dims=settings.batch_dims),
            keeps_outputs=settings.keep_outputs,
            shares_outputs=settings.share_outputs,
            undo=Undo(
                [parameter for _, parameter in self.named_parameters()],
                [stage.module for stage in self._stages.stages],
            ),
            foreign=ForeignParameters(assembly.owners(sources, ties)),
            ties=ties,
            streams=assembly.streams(sources, self._stages, settings),
            recordings=assembly.recordings(cut.staged, self._stages, parts, ties),
            defers_statistics=settings.deferred_batch_norm,
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule of a full batch."""
        return self._engine.timetable.schedule

    @property
    def step_number(self) -> int:
        """How many training steps were completed: random numbers depend on it and on the seed.

        Set it after a restart, and the steps that follow draw what they would have drawn.
        """
        return self._engine.streams.completed[Purpose.TRAIN.name]

    @step_number.setter
    def step_number(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"step_number: wanted a whole number of at least 0, got {number!r}")
        self._engine.streams.completed[Purpose.TRAIN.name] = number

    @property
    def keep_outputs(self) -> bool:
        """Whether ``step`` returns the outputs of the batch; it may be set between two steps."""
        return self._engine.keeps_outputs

    @keep_outputs.setter
    def keep_outputs(self, keeps: bool) -> None:
        self._engine.keeps_outputs = keeps

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run one batch: forward, loss and backward of every microbatch; gradients are accumulated.

        After ``eval()``, or under ``torch.no_grad()``, it evaluates instead: the loss is computed,
        and no gradient is touched.

        Args:
            args: The arguments of the model. A rank that is given nothing, ``step()``, receives
                what it needs from the rank of stage 0. Ranks that are given data get the same.
            target: What ``loss_fn`` compares the output with, on the rank of the last stage or on
                any other. Which ranks are given what is settled in the first call of each kind.
            kwargs: The keyword arguments of the model.
        """
        trains = self.training and torch.is_grad_enabled()
        with self._settings.errors():
            return self._engine.step(
                args, kwargs, target, trains=trains, observer=self._settings.observer
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the whole batch.

        In one process, in train mode and with grad enabled, the result can be differentiated:
        ``loss_fn(pipe(x), y).backward()`` gives every parameter its gradient.
        """
        engine, observer = self._engine, self._settings.observer
        in_one_process = isinstance(engine.runner, ThreadRunner)
        trains = self.training and torch.is_grad_enabled() and self.schedule.has_backward
        with self._settings.errors():
            if trains and in_one_process:
                return differentiable.call(engine, args, kwargs, observer, self._settings.errors)
            return engine.infer(args, kwargs, observer)

    def train(self, mode: bool = True) -> Pipeline:
        """Put the pipeline and all modules of its stages into training mode."""
        self.training = mode
        self._stages.train(mode)
        self._engine.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put the pipeline and all modules of its stages into evaluation mode."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stages in this process, a tied one once.

        Under torchrun, a process whose stages have no parameter that requires a gradient also
        yields one without elements: an optimizer refuses an empty list, and every process runs the
        same script. It gets no gradient, and no other method of the pipeline knows it.
        """
        return self._stages.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield them with the names they have in the original model, a tied one with its first."""
        return self._stages.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the stages in this process, under original names."""
        return self._stages.named_buffers()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stages in this process, under all of its original names."""
        return self._stages.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadedKeys:
        """Load a state_dict of the whole model; every process takes its part."""
        return self._stages.load_state_dict(state_dict, strict=strict)

    def close(self) -> None:
        """Let go of threads and connections now; collection and interpreter exit do it too."""
        self._engine.runner.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Pipeline cannot be copied or pickled: copy the model, build another one")

    def __repr__(self) -> str:
        return assembly.summary(self.plan, self.schedule, self._engine.runner)
