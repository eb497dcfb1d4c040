"""What blocks would cost on a described device: counted, not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.inputs import Arguments
from stageline.capturing.recorded import Graph
from stageline.capturing.staged import StagedModel
from stageline.errors import ConfigError
from stageline.partitioning.costs import BlockCosts, ModelCosts
from stageline.partitioning.device import Device
from stageline.partitioning.rows import read_rows
from stageline.planning.abstract import Abstraction, BlockEstimate
from stageline.wording import from_to


def estimate_costs(
    graph: Graph,
    device: Device | str | None = None,
    *,
    rows: int | Sequence[int] | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    target: Any = None,
) -> ModelCosts:
    """Return what each block of a model would cost on a device, without running it.

    Operations are counted on tensors that have a shape and no numbers, so that a model on meta, or
    one that is too large for this machine, costs nothing. Each operation takes as long as its
    arithmetic or its memory traffic on that device, whichever is longer.

    Example:
        >>> from torch import nn
        >>> from stageline import capture
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2)))
        >>> costs = estimate_costs(capture(model, (torch.randn(512, 4096),)), "A100")
        >>> [(block.forward, block.input_gradient, block.weight_gradient) for block in costs.blocks]
        [(1767038, 0, 1874922), (1767038, 1767038, 1874922)]

    Args:
        graph: What ``sl.capture`` returned.
        device: A description, the name of one that stageline brings (``"A100"``), or the path of a
            TOML file; a nominal CPU core if left out.
        rows: The size of a microbatch, or several sizes; that of the example if left out.
        loss_fn: ``(output, target) -> scalar``, which then counts to the last block.
        target: What the loss is given for the rows of the example.
    """
    if not isinstance(graph, Graph):
        got = type(graph).__name__
        wanted = f"graph: wanted what sl.capture(model, args) returns, got {got}"
        raise ConfigError("sl.estimate_costs", [wanted])
    described = described_device(device)
    sizes, faults = read_rows(rows, graph.example)
    if faults:
        raise ConfigError("sl.estimate_costs", faults)
    staged = graph.cut(graph.cuts)
    ending = _Ending(loss_fn, Arguments.of((target,), {}))
    found = [_estimate(graph, staged, described, size, ending) for size in sizes]
    return replace(found[0], others=tuple(found[1:]))


def described_device(device: Device | str | None) -> Device:
    """Return a device that somebody described, named or wrote down in a file."""
    if isinstance(device, Device):
        return device
    if device is None:
        return Device.named("cpu")
    return Device.load(device) if str(device).endswith(".toml") else Device.named(device)


@dataclass(frozen=True)
class _Ending:
    """What follows the last block: a loss, or nothing."""

    loss_fn: Callable[[Any, Any], Tensor] | None
    target: Arguments

    def __call__(self, output: Any, rows: int) -> Any:
        if self.loss_fn is None:
            return output
        target = self.target if self.target.rows is None else self.target.with_rows(rows)
        return self.loss_fn(output, target.unpacked()[0][0])


def _estimate(
    graph: Graph, staged: StagedModel, device: Device, rows: int, ending: _Ending
) -> ModelCosts:
    origin = f"estimated for {device.name}"
    try:
        example = graph.example.with_rows(rows)
        blocks = _counted(staged, device, example, partial(ending, rows=rows))
    except Exception as cause:  # whatever a model's own code raises where there are no numbers
        why = str(cause).strip().splitlines()
        origin += f", from the recording ({type(cause).__name__}: {why[0] if why else ''})"
        return ModelCosts(_recorded(graph, device, rows), rows, origin)
    spans = pairwise([0, *graph.cuts, graph.num_nodes])
    costs = [_block(graph, *span, found) for span, found in zip(spans, blocks, strict=True)]
    costs[-1] = replace(costs[-1], output_bytes=0)
    return ModelCosts(tuple(costs), rows, origin)


def _counted(
    staged: StagedModel, device: Device, example: Arguments, ending: Callable[[Any], Any]
) -> list[BlockEstimate]:
    abstraction = Abstraction(device)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        staged.look_at_model()
        variant, leaves = staged.choose(*example.unpacked())
        value: Any = None
        found = []
        for index, stage in sorted(staged.held.items()):
            block = abstraction.copy_of(stage)
            after = ending if index == len(staged.held) - 1 else None
            call = partial(_called, block, leaves, variant, after)
            estimate, value = abstraction.run(block, call, value, leaves, is_first=not index)
            found.append(estimate)
    return found


def _called(
    block: nn.Module, leaves: Any, variant: str, after: Callable[[Any], Any] | None, value: Any
) -> Any:
    output = block(value, leaves, variant)
    return output if after is None else after(output)


def _block(graph: Graph, begin: int, end: int, found: BlockEstimate) -> BlockCosts:
    load = graph.load(begin, end)
    return BlockCosts(
        name=from_to(graph.label(begin, end)),
        forward=found.forward,
        input_gradient=found.input_gradient,
        weight_gradient=max(found.backward - found.input_gradient, 0),
        backward=found.backward,
        input_bytes=found.input_bytes,
        activation_bytes=found.activation_bytes,
        input_gradient_frees=found.input_gradient_frees,
        parameters=load.parameters,
        parameter_bytes=load.parameter_bytes,
        output_bytes=found.output_bytes,
        kept_output_bytes=found.kept_output_bytes,
        wants_input_gradient=found.wants_input_gradient,
    )


def _recorded(graph: Graph, device: Device, rows: int) -> tuple[BlockCosts, ...]:
    """Return what the recording says: its forward, the halves of the backward alike."""
    assert graph.example.rows is not None
    scale = rows / graph.example.rows
    ends = [0, *graph.cuts, graph.num_nodes]
    inputs = (leaf for leaf in graph.example.leaves if isinstance(leaf, Tensor))
    is_wanted = any(leaf.requires_grad for leaf in inputs)
    blocks = []
    for begin, end in pairwise(ends):
        wants = bool(begin) or is_wanted
        load = graph.load(begin, end)
        flops, moved = graph.work(begin, end)
        seconds = scale * (flops / device.speed("float32") + moved / device.bandwidth)
        one = round(1e9 * seconds)
        sizes = [
            round(scale * sum(value.num_bytes for value in graph.crossing(place)))
            if 0 < place < graph.num_nodes
            else 0
            for place in (begin, end)
        ]
        blocks.append(
            BlockCosts(
                name=from_to(graph.label(begin, end)),
                forward=one,
                input_gradient=one if wants else 0,
                weight_gradient=one if load.parameters else 0,
                backward=one * (wants + bool(load.parameters)),
                input_bytes=sizes[0],
                activation_bytes=round(scale * load.activation_bytes),
                input_gradient_frees=0,
                parameters=load.parameters,
                parameter_bytes=load.parameter_bytes,
                output_bytes=sizes[1],
                wants_input_gradient=wants,
            )
        )
    return tuple(blocks)
