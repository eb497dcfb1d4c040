"""``torch.distributed.pipelining.stage``: one stage of a pipeline, as a schedule takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from stageline.compat.pippy.IR import Pipe, PipeInfo
from stageline.compat.pippy.microbatch import LossReducer
from stageline.compat.pippy.replicas import without_replicas
from stageline.errors import ConfigError
from stageline.running.world import World
from stageline.torch_private import tree_flatten

__all__ = ["ManualPipelineStage", "PipelineStage", "build_stage"]


class PipelineStage:
    """One stage: of a Pipe, or a module that the caller has cut.

    ::

        PipelineStage(submodule, stage_index, num_stages, device, input_args=None,
                      output_args=None, output_grads=None, input_grads=None, group=None,
                      dw_builder=None, get_mesh=None)
        PipelineStage(pipe, stage_index, device, group=None)

    Shapes travel with the values, so that ``input_args`` and its like are not needed; they are
    accepted. A stage of a Pipe can be called: ``stage(x)`` on the first rank and ``stage()`` on all
    others run one batch forward, and the last rank returns the output.

    Example:
        >>> PipelineStage(nn.Linear(2, 2), 0, 1, "cpu").is_last
        True

    Attributes:
        submod: The module: for its optimizer, its weights, its mode.
        stage_index: Which stage it is.
        num_stages: How many stages there are.
        device: Where it runs.
        group: The processes that hold the pipeline; None if all do.
        group_rank: This process among them.
        group_size: How many they are.
        pipe: The Pipe that it is a stage of; None for a module that the caller has cut.
        chunks: How many microbatches a call of it makes, if the Pipe says so.
        schedule: The schedule that was made last of this stage; None before.
        dw_builder: Returns what makes the gradients of weights that the module's own backward
            leaves out. It is called for each microbatch when the step has run.
    """

    def __init__(self, submodule: nn.Module, stage_index: int, *args: Any, **kwargs: Any) -> None:
        self.pipe = submodule if isinstance(submodule, Pipe) else None
        self.chunks = None if self.pipe is None else self.pipe.num_chunks
        self.stage_index = stage_index
        self.dw_builder: Callable[[], Callable[[], None]] | None = None
        if self.pipe is not None:
            self._read_of_pipe(*args, **kwargs)
            self.num_stages = self.pipe.num_stages
        else:
            self._read(*args, **kwargs)
        self._check()
        self.submod: nn.Module = (
            submodule if self.pipe is None else self.pipe.get_stage_module(stage_index)
        )
        if self.pipe is not None and not any(p.is_meta for p in self.submod.parameters()):
            self.submod.to(self.device)
        self.schedule: Any = None
        self._forward: Any = None  # the schedule of calls, which has no loss

    def _read_of_pipe(self, device: torch.device | str, group: ProcessGroup | None = None) -> None:
        self.device, self.group = torch.device(device), group

    def _read(
        self,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[[], None]] | None = None,
        get_mesh: Any = None,
    ) -> None:
        self.num_stages = num_stages
        self.device, self.group = torch.device(device), group
        self.dw_builder = dw_builder

    def _check(self) -> None:
        if not 0 <= self.stage_index < self.num_stages:
            raise ValueError(f"Stage index {self.stage_index} is out of range of {self.num_stages}")
        world = World.find(self.group)
        self.group_rank = 0 if world is None else world.rank
        self.group_size = 1 if world is None else world.size
        if self.group_size > self.num_stages:
            raise RuntimeError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{self.num_stages}"
            )

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def has_backward(self) -> bool:
        """Whether a schedule with a loss has this stage."""
        return self.schedule is not None and self.schedule.has_backward

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.submod.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.submod.named_parameters()

    def remap_qualname(self, qualname: str) -> str:
        """Return the model's name for a name in the state_dict of ``submod``: it is the same."""
        return qualname

    def clear_runtime_states(self) -> None:
        """Do nothing: a step leaves nothing behind."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch forward, cut into ``chunks`` microbatches.

        The first rank gives the arguments of the model; the last one is returned the output.
        """
        from stageline.compat.pippy.schedules import ScheduleGPipe  # it needs this

        if self.chunks is None:
            raise ConfigError(
                "stage(x)",
                [
                    "num_chunks is not known: make the pipe with pipeline(model, num_chunks, "
                    "example_args=...), or use a schedule"
                ],
            )
        if self.pipe is not None and _trains(self.pipe.output_chunk_spec):
            raise ConfigError(
                "stage(x)",
                [
                    "output_chunk_spec has a loss, with which PiPPy 0.2 trained in this call: use "
                    "ScheduleGPipe(stage, num_chunks, loss_fn=...) and its step()"
                ],
            )
        if args and not self.is_first:
            raise TypeError(
                f"stage {self.stage_index} was called with arguments: give the rank of stage 0 all "
                "arguments of the model, what later stages use is sent to them"
            )
        if self._forward is None:
            schedule = self.schedule
            self._forward = ScheduleGPipe(self, self.chunks)  # which enters itself here
            self.schedule = schedule
        return self._forward.step(*args, **kwargs)


def _trains(spec: Any) -> bool:
    return any(isinstance(leaf, LossReducer) for leaf in tree_flatten(spec)[0])


class ManualPipelineStage(PipelineStage):
    """PiPPy's stage of a module that the caller has cut."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        num_microbatches: int,
        input_args: Any = None,
        output_args: Any = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group)
        self.submod.to(self.device)
        self.chunks = num_microbatches


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: ProcessGroup | None = None,
) -> PipelineStage:
    """Return one stage of a Pipe.

    Args:
        stage_module: ``pipe.get_stage_module(stage_index)``, or a DistributedDataParallel of it.
        stage_index: Which stage it is.
        pipe_info: ``pipe.info()``.
        device: Where it runs.
        group: The processes that hold the pipeline.
    """
    stage = PipelineStage(pipe_info.pipe, stage_index, device, group)
    if without_replicas(stage_module) is not stage.submod:
        raise ConfigError(
            "build_stage",
            [
                "stage_module is not what pipe.get_stage_module returns, nor a "
                "DistributedDataParallel of it: to put another module around a stage, use "
                "sl.Pipeline(plan=pipe.plan, wrap_stage=...)"
            ],
        )
    stage.submod = stage_module
    return stage
