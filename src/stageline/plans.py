"""``sl.find_plans``: a model in, the best ways to run it out. Connects the rooms, plans nothing.

>>> import torch
>>> with torch.device("meta"):
...     model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
>>> found = find_plans(
...     model, (torch.randn(64, 1024),), ranks=4, batch_size=1024, device="A100",
...     schedules=["1f1b", "zb-h1"], microbatches=[16],
... )
>>> found.best.method.schedule, found.best.sizes
('zb-h1', (2, 2, 2, 2))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from stageline.capturing.recorded import Graph, capture
from stageline.errors import ConfigError
from stageline.observing.measuring import measure_costs
from stageline.partitioning.amounts import read_bytes
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.device import Device
from stageline.planning.asking import question_faults, sizes_of_interest
from stageline.planning.estimating import described_device, estimate_costs
from stageline.planning.proposals import Proposals
from stageline.planning.proposing import propose
from stageline.planning.searching.problem import Metric

_OF_SIZES = ("ranks", "batch_size", "data_parallel", "microbatches")


def find_plans(
    model: nn.Module | Graph,
    example_args: tuple[Any, ...] | None = None,
    *,
    ranks: int,
    batch_size: int,
    memory_limit: int | str | None = None,
    device: Device | str | None = None,
    costs: ModelCosts | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    target: Any = None,
    data_parallel: int | Literal["auto"] = 1,
    schedules: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    metric: Metric = "T",
    top: int = 5,
) -> Proposals:
    """Search for the best way to run a model: cuts, placement, schedule, microbatches, recompute.

    Costs are measured, or estimated for a device; all else is simulated. ``print`` the result.

    Args:
        model: Any module, also one on meta; or what ``sl.capture`` returned.
        example_args: The arguments of one call, as a batch of a few rows.
        ranks: How many ranks there are in all.
        batch_size: The rows of a step.
        memory_limit: What each rank has, ``"16GiB"`` or bytes; that of the device if left out.
        device: A ``Device``, a known name, or the path of a TOML file; this machine if left out.
        costs: What the blocks cost, if you know that already.
        example_kwargs: Keyword arguments of that call.
        loss_fn: ``(output, target) -> scalar``, which then counts to the last block.
        target: What the loss is given for the rows of the example.
        data_parallel: How many copies share ranks and batch (a ``Pipeline`` runs one), or "auto".
        schedules: Names to try; all that can be run if left out.
        microbatches: Numbers to try; those that cut the batch evenly, or nearly, if left out.
        metric: ``"T"``, until the last rank has ended; ``"span"``, from its own first forward on.
        top: How many proposals to return.
    """
    asked: dict[str, Any] = {
        "ranks": ranks,
        "batch_size": batch_size,
        "data_parallel": data_parallel,
        "schedules": schedules,
        "microbatches": microbatches,
        "metric": metric,
        "top": top,
    }
    has_example = example_args is not None or example_kwargs is not None
    _refuse(question_faults(**asked) + _faults(model, has_example, memory_limit, costs))
    described = None if device is None else described_device(device)
    opened_for = 1 if data_parallel == "auto" else ranks // data_parallel
    graph = _captured(model, example_args, example_kwargs).opened_at((), num_stages=opened_for)
    if costs is None:
        sizes = sizes_of_interest(**{name: asked[name] for name in _OF_SIZES})
        costs = _costs(graph, described, sizes, loss_fn, target)
    _refuse(_block_faults(costs, graph))
    machine, limit = described or Device.named("cpu"), read_bytes(memory_limit)
    return propose(costs, device=machine, memory_limit=limit, **asked).of_graph(graph, opened_for)


def _captured(
    model: nn.Module | Graph, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> Graph:
    return model if isinstance(model, Graph) else capture(model, args or (), kwargs)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise ConfigError("sl.find_plans", faults)


def _block_faults(costs: ModelCosts, graph: Graph) -> list[str]:
    found, wanted = len(costs.blocks), len(graph.cuts) + 1
    if found == wanted:
        return []
    return [f"costs: they are of {found} blocks, the model has {wanted}: measure them anew"]


def _faults(model: object, has_example: bool, memory_limit: object, costs: object) -> list[str]:
    faults = []
    if memory_limit is not None and read_bytes(memory_limit) is None:
        faults.append(f"memory_limit={memory_limit!r}: wanted bytes, or text like '16GiB'")
    if costs is not None and not isinstance(costs, ModelCosts):
        faults.append(f"costs: wanted a ModelCosts, got {type(costs).__name__}")
    if isinstance(model, Graph) and has_example:
        faults.append("example_args: the captured model has one already: leave it out")
    return faults


def _costs(
    graph: Graph,
    device: Device | None,
    rows: Sequence[int],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    target: Any,
) -> ModelCosts:
    """Time the blocks here if they can be run and no device is described; else estimate them."""
    on_meta = any(parameter.is_meta for parameter in graph.model.parameters())
    if device is None and not on_meta:
        return measure_costs(graph, rows=rows, loss_fn=loss_fn, target=target)
    return estimate_costs(graph, device, rows=rows, loss_fn=loss_fn, target=target)
