"""``pippy.IR``: the Pipe that a model becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup

from stageline.capturing.graph import Cuttable
from stageline.capturing.recorded import capture
from stageline.compat.pippy import printing
from stageline.compat.pippy.microbatch import active_specs
from stageline.compat.pippy.ModelSplit import SplitPolicy
from stageline.compat.pippy.split_points import (
    PipeSplitWrapper,
    SplitPoint,
    annotate_split_points,
    pipe_split,
    sides_of,
)
from stageline.compat.pippy.stage_module import PipeStageModule, SplitModule, no_copy
from stageline.errors import ConfigError
from stageline.partitioning.named import cuts_beside_calls
from stageline.partitioning.plan import Plan
from stageline.torch_private import storage_of

if TYPE_CHECKING:
    from stageline.compat.pippy.stage import PipelineStage

__all__ = [
    "LossWrapper",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "PipeStageModule",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "pipe_split",
    "pipeline",
]

_OF_BATCH = (
    *("example_args", "example_kwargs", "split_policy"),
    *("args_chunk_spec", "kwargs_chunk_spec", "output_chunk_spec", "constraints"),
)


def pipeline(module: nn.Module, *args: Any, **kwargs: Any) -> Pipe:
    """Cut a model into stages, as its split points say.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> pipe = pipeline(model, (torch.zeros(2, 4),), split_spec={"2": SplitPoint.BEGINNING})
        >>> pipe.num_stages
        2

    It is called as in ``torch.distributed.pipelining``, with an example of a microbatch, or as in
    PiPPy, with the number of microbatches and an example of a batch::

        pipeline(module, mb_args, mb_kwargs=None, split_spec=None, split_policy=None)
        pipeline(module, num_chunks, example_args, example_kwargs=None, split_spec=None,
                 split_policy=None)

    ``pipe_split()`` in the model's code and ``annotate_split_points`` count besides ``split_spec``.
    """
    if _is_pippys(args, kwargs):
        return _pipeline_of_batch(module, *args, **kwargs)
    return _pipeline_of_microbatch(module, *args, **kwargs)


def _is_pippys(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return isinstance(args[0] if args else kwargs.get("num_chunks"), int)


def _pipeline_of_batch(
    module: nn.Module,
    num_chunks: int,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, Any] | None = None,
    split_policy: Callable[..., Any] | None = None,
    *,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    output_chunk_spec: Any = None,
    constraints: Any = None,  # on sizes, which are free here
) -> Pipe:
    """PiPPy's ``pipeline``."""
    of_args, of_kwargs = active_specs()
    pipe = _pipeline_of_microbatch(module, example_args, example_kwargs, split_spec, split_policy)
    pipe.num_chunks = num_chunks
    pipe.args_chunk_spec = of_args if args_chunk_spec is None else args_chunk_spec
    pipe.kwargs_chunk_spec = of_kwargs if kwargs_chunk_spec is None else kwargs_chunk_spec
    pipe.output_chunk_spec = output_chunk_spec
    return pipe


def _pipeline_of_microbatch(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, Any] | None = None,
    split_policy: Callable[..., Any] | None = None,
) -> Pipe:
    """torch's ``pipeline``."""
    if split_spec is not None and split_policy is not None:
        raise ValueError(
            "Cannot specify both `split_spec` and `split_policy`. Please use only one of them."
        )
    if split_policy is not None and not isinstance(split_policy, SplitPolicy):
        raise TypeError(
            "split_policy: a function that changes an fx graph has nothing to change here, as "
            "modules stay whole: use split_into_equal_size(n), split_on_size_threshold(n), "
            "split_spec, or pipe_split() in the model's code"
        )
    sides = sides_of(module, split_spec or {})
    graph = capture(module, mb_args, mb_kwargs)
    plan = _cut(graph, sides) if split_policy is None else split_policy(graph)
    return Pipe(plan, sides if split_policy is None else None)


def _cut(graph: Cuttable, sides: Mapping[str, str]) -> Plan:
    """Cut a graph beside the calls of some modules, and wherever its code says ``pipe_split``."""
    graph = graph.opened_at(list(sides))
    cuts, faults = cuts_beside_calls(graph, sides) if sides else ([], [])
    faults += graph.findings
    if faults:
        raise ConfigError("pipeline", faults)
    points = {mark.begin for mark in graph.marks if mark.kind == "cut"}
    places = sorted({*cuts, *points} - {0, graph.num_nodes})
    return Plan.of(graph, places, range(len(places) + 1), opened=list(sides))


@dataclass(frozen=True)
class PipeInfo:
    """What is known of a pipe without its weights.

    Attributes:
        graph: How stages call each other; prints as the code of the pipe.
        num_stages: How many there are.
        has_loss_and_backward: Always False: a schedule has the loss.
        num_chunks: The number of microbatches, if the pipe was made with it.
        pipe: The pipe itself.
    """

    graph: str
    num_stages: int
    has_loss_and_backward: bool
    num_chunks: int | None
    pipe: Pipe


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose children are the stages."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        return PipeSequential(*sequential_instance)

    def forward(self, input: Any) -> Any:
        for index, module in enumerate(self):
            if index:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model and its loss as one module; a subclass says in ``forward`` how they are called."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "This instance of LossWrapper does not have an overridden forward(). Please implement "
            "forward() to specify the arguments, connection between the module and loss, and loss "
            "output value."
        )


class TrivialLossWrapper(LossWrapper):
    """Calls the model with ``x``, and the loss with its output and ``targets``."""

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)


class Pipe(nn.Module):
    """A model in stages.

    Attributes:
        plan: The same for ``sl.Pipeline(plan=...)``.
        split_gm: Holds the stages as ``submod_0``, ``submod_1``; prints as the pipe.
        num_stages: How many stages.
        num_chunks: How many microbatches ``PipelineStage(pipe, ...)`` makes when it is called.
        replicated_params: For each parameter that several stages use, its name in each of them.
            Its gradient is the sum of what all of them make, on each.
    """

    def __init__(self, plan: Plan, sides: Mapping[str, str] | None) -> None:
        super().__init__()
        self.plan = plan
        self.num_stages = plan.num_stages
        self.num_chunks: int | None = None
        self.args_chunk_spec: Any = None
        self.kwargs_chunk_spec: Any = None
        self.output_chunk_spec: Any = None
        self.has_loss_and_backward = False
        self.loss_spec: Any = None
        self._sides = sides
        self._texts: list[str] | None = None
        self.split_gm = SplitModule(self.print_readable, self.__repr__)
        for index, stage in sorted(plan.parts.held.items()):
            self.split_gm.add_module(f"submod_{index}", PipeStageModule(stage, self._text(index)))
        self.replicated_params = self._replicated()

    @staticmethod
    def from_tracing(mod: nn.Module, *args: Any, **kwargs: Any) -> Pipe:
        """Cut a model where it is annotated; called as torch's, or as PiPPy's with num_chunks.

        ::

            Pipe.from_tracing(mod, example_args, example_kwargs=None, split_policy=None)
            Pipe.from_tracing(mod, num_chunks, example_args, example_kwargs=None,
                              split_policy=None, args_chunk_spec=None, kwargs_chunk_spec=None,
                              output_chunk_spec=None, constraints=None)
        """
        if not _is_pippys(args, kwargs):
            return _traced(mod, *args, **kwargs)
        if "num_chunks" in kwargs:
            args = (kwargs.pop("num_chunks"), *args)
        num_chunks, *others = args
        if len(others) > len(_OF_BATCH):
            raise TypeError(f"from_tracing: {args[len(_OF_BATCH) + 1 :]} is too many arguments")
        named = dict(zip(_OF_BATCH, others, strict=False))
        return _pipeline_of_batch(mod, num_chunks, **named, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages one after the other in this process: what the model returns."""
        made = self.plan.run(*args, **kwargs)
        return made if isinstance(made, (tuple, list, dict)) else (made,)

    def get_stage_module(self, stage_idx: int) -> PipeStageModule:
        """Return the module of one stage: for its optimizer, its weights, its mode."""
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"Invalid stage index {stage_idx}!")
        stage = self.split_gm.get_submodule(f"submod_{stage_idx}")
        assert isinstance(stage, PipeStageModule)
        return stage

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        group: ProcessGroup | None = None,
    ) -> PipelineStage:
        """Return one stage for a schedule."""
        from stageline.compat.pippy.stage import PipelineStage  # it needs Pipe

        return PipelineStage(self, stage_index, device, group)

    def info(self) -> PipeInfo:
        return PipeInfo(
            printing.pipe_code(self.plan),
            self.num_stages,
            self.has_loss_and_backward,
            self.num_chunks,
            self,
        )

    def print_readable(self) -> None:
        """Print the pipe and the code of every stage."""
        print(self)
        for index in range(self.num_stages):
            print(f"\n{self.get_stage_module(index)}")

    def remap_qualname(self, qualname: str) -> str:
        """Return the model's name for a name in a state_dict of this pipe."""
        name = qualname.removeprefix("split_gm.")
        return name.partition(".")[2] if name.startswith("submod_") else name

    def _text(self, index: int) -> Callable[[], str]:
        def text() -> str:
            if self._texts is None:
                self._texts = printing.stage_texts(self.plan, self._opened())
            return self._texts[index]

        return text

    def _opened(self) -> Plan | None:
        """Return the same stages with all modules open, to be printed: down to layers."""
        if self._sides is None:
            return None
        graph = self.plan.graph
        try:
            opened = _cut(graph.opened_at(graph.module_names), self._sides)
        except (RuntimeError, ValueError):  # code that cannot be recorded stays closed
            return None
        return opened if opened.num_stages == self.num_stages else None

    def check_shared(self) -> None:
        """Check that what stages share when the pipe was made is still shared.

        Raises:
            ValueError: Stages have tensors of their own by now.
        """
        for users in self.replicated_params:
            names = [f"{stage}.{name}" for stage, name in users.items()]
            storages = {storage_of(self.split_gm.get_parameter(name)) for name in names}
            if len(storages) > 1:
                raise ValueError(
                    f"{' and '.join(names)} are one parameter of the model, and now they are "
                    "several (to_empty() does that): tie them again, or make the schedule while "
                    "the model is on meta, which makes it real, and load weights after that"
                )

    def _replicated(self) -> list[dict[str, str]]:
        users: dict[int, dict[str, str]] = {}
        for stage, module in self.split_gm.named_children():
            for name, parameter in module.named_parameters():
                users.setdefault(id(parameter), {})[stage] = name
        return [names for names in users.values() if len(names) > 1]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise no_copy("a Pipe")

    def __repr__(self) -> str:
        return printing.pipe_text(self.plan, [self._text(i)() for i in range(self.num_stages)])


def _traced(
    mod: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    split_policy: Callable[..., Any] | None = None,
) -> Pipe:
    """torch's ``Pipe.from_tracing``."""
    return _pipeline_of_microbatch(mod, example_args, example_kwargs, None, split_policy)
