"""How many layers each partition gets, by the time or the memory that the layers need.

The cut is exact: no other one has a cheaper costliest partition.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.alive import Alive
from stageline.compat.fairscale.nn.pipe.microbatch import Value, check
from stageline.compat.fairscale.nn.pipe.skip.carrying import Skips, carrying
from stageline.compat.fairscale.nn.pipe.splitting import Device, verify_module
from stageline.partitioning.balance import balance

__all__ = ["balance_by_size", "balance_by_time"]

_MIN_TURNS = 3  # the first runs of a layer are slow


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Return how many layers each partition gets so that all take about the same time.

    Every layer is copied and run forward and back; the model stays as it is.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8), nn.ReLU(), nn.ReLU())
        >>> sum(balance_by_time(2, model, torch.randn(64, 8), timeout=0.1))
        4

    Args:
        partitions: How many partitions there will be.
        module: The model.
        sample: An input; a microbatch is best.
        timeout: For how many seconds to measure, all layers together.
        device: Where to run; if left out, on the accelerator if there is one, else on the CPU.
    """
    _verify(partitions, module, sample)
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    where = _device(device)
    times = [math.inf] * len(module)
    end = time.perf_counter() + timeout
    with torch.random.fork_rng(devices=[]):
        # All layers in turn: what else the machine does for a while then slows all of them.
        for turn in itertools.count(1):
            for index, layer in enumerate(_layers(module, sample, where)):
                times[index] = min(times[index], _time(layer, where))
            if turn >= _MIN_TURNS and time.perf_counter() >= end:
                break
    return balance([int(1e6 * time) for time in times], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Value,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Return how many layers each partition gets so that all need about the same memory.

    A layer counts the activations that it keeps of one microbatch, and ``param_scale`` times its
    parameters: 2 to 3 for SGD, 4 to 5 for Adam, for gradients and the state of the optimizer are as
    large as the parameters.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(n, n + 1) for n in (64, 65, 66, 67)))
        >>> balance_by_size(2, model, torch.randn(32, 64), chunks=4)
        [2, 2]

    Args:
        partitions: How many partitions there will be.
        module: The model.
        input: A batch as in training.
        chunks: Into how many microbatches training will cut it.
        param_scale: How many copies of the parameters training holds.
        device: Where to run; if left out, on the accelerator if there is one, else on the CPU.
    """
    _verify(partitions, module, input)
    if chunks <= 0:
        raise ValueError("number of chunks must be positive integer")
    with torch.random.fork_rng(devices=[]):
        sizes = [
            int(_activations(layer) / chunks + _parameters(layer) * param_scale)
            for layer in _layers(module, input, _device(device))
        ]
    return balance(sizes, partitions)


def _verify(partitions: int, module: nn.Sequential, sample: Value) -> None:
    verify_module(module)
    check(sample)
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if len(module) < partitions:
        raise ValueError(
            f"sequence is shorter than intended partitions ({len(module)} < {partitions}): "
            "a partition has at least one layer"
        )


class _Layer:
    """A copy of one layer, which runs once, and what comes to it.

    Args:
        module: The copy.
        value: What the layer before returned, without its graph.
        skips: What earlier layers have stashed for later ones.
    """

    def __init__(self, module: nn.Module, value: Value, skips: Skips) -> None:
        self.module = module
        self.value = _map(torch.clone, value)  # the layer may write into it
        self.skips = skips
        self.returned: Any = None

    def run(self) -> Any:
        """Run the layer forward; what it stashes is with the other skips then."""
        with torch.enable_grad(), carrying(self.skips):
            self.returned = self.module(self.value)
        return self.returned


def _layers(module: nn.Sequential, sample: Value, device: torch.device) -> Iterator[_Layer]:
    """Yield the layers one by one; each must be run before the next."""
    value: Value = _map(lambda leaf: _alone(leaf, device), sample)
    skips: Skips = {}
    for original in module:
        layer = _Layer(copy.deepcopy(original).to(device).train(), value, skips)
        yield layer
        value = _map(_alone, layer.returned)
        skips = {key: None if skip is None else _alone(skip) for key, skip in skips.items()}


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _alone(leaf: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor without the graph behind it, which another backward may have freed."""
    return leaf.detach().to(device or leaf.device).requires_grad_(leaf.requires_grad)


def _time(layer: _Layer, device: torch.device) -> float:
    """Return how long forward and backward take."""
    _wait_for(device)
    begin = time.perf_counter()
    _backward(layer.run())
    _wait_for(device)
    return time.perf_counter() - begin


def _activations(layer: _Layer) -> int:
    """Return the bytes that a forward leaves for its backward, its output among them."""
    with Alive() as alive:
        layer.run()
        held: int = alive.count([*layer.module.parameters(), *layer.module.buffers()])
    return held


def _parameters(layer: _Layer) -> int:
    return sum(each.nbytes for each in layer.module.parameters())


def _device(device: Device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator and torch.accelerator.is_available() else torch.device("cpu")


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _backward(output: Any) -> None:
    outputs: Sequence[Tensor] = output if isinstance(output, tuple) else (output,)
    roots = [one for one in outputs if one.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
