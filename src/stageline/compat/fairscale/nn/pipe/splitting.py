"""From an ``nn.Sequential`` and a balance to partitions on devices; and what is wrong with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

Device = torch.device | int | str


class BalanceError(ValueError):
    """The balance does not fit the model."""


def verify_module(module: object) -> None:
    """Check that a model can be split into partitions.

    Raises:
        TypeError: It is no ``nn.Sequential``.
        ValueError: It holds the same layer twice.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError("module must be nn.Sequential to be partitioned")
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")


def find_devices(devices: Iterable[Device] | None, num_partitions: int) -> list[torch.device]:
    """Return the devices to use: all accelerators if none are given, the CPU if there is none."""
    if devices is not None:
        return [torch.device(device) for device in devices]
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return [torch.device("cpu")] * num_partitions
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def read_balance(balance: Iterable[float], num_layers: int) -> list[int]:
    """Return the number of layers of each partition.

    Raises:
        BalanceError: They are not positive, or not as many as the model has.
    """
    given = list(balance)
    if num_layers != sum(given):
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {num_layers}, sum of balance: {sum(given)})"
        )
    if any(count <= 0 or count != int(count) for count in given):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {given})")
    return [int(count) for count in given]


def split(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> nn.ModuleList:
    """Return the partitions: the same layers under the same names, each partition on its device.

    Raises:
        IndexError: There are fewer devices than partitions.
        ValueError: Partitions on different devices share a parameter.
    """
    if len(balance) > len(devices):
        raise IndexError(
            "too few devices to hold given partitions "
            f"(devices: {len(devices)}, partitions: {len(balance)})"
        )
    layers = iter(module.named_children())
    partitions = [
        nn.Sequential(OrderedDict(next(layers) for _ in range(count))) for count in balance
    ]
    holders: dict[nn.Parameter, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=False):
        for parameter in partition.parameters():
            if holders.setdefault(parameter, device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported"
                )
    for partition, device in zip(partitions, devices, strict=False):
        partition.to(device)
    return nn.ModuleList(partitions)


def group(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[range]:
    """Return which partitions make one stage of the pipeline: those that share a tensor.

    The pipeline would run a copy of a layer whose weight two stages use, without the hooks that are
    put on the layer later. Between the first and the last partition that share a tensor, all are
    one stage, if they are on one device.

    Example:
        >>> first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        >>> second.weight = first.weight
        >>> group([first, second, third], [torch.device("cpu")] * 3)
        [range(0, 2), range(2, 3)]
    """
    ends = list(range(1, len(partitions) + 1))
    firsts: dict[torch.Tensor, int] = {}
    for index, partition in enumerate(partitions):
        for tensor in (*partition.parameters(), *partition.buffers()):
            first = firsts.setdefault(tensor, index)
            if len(set(devices[first : index + 1])) == 1:
                ends[first] = index + 1
    groups: list[range] = []
    for index, end in enumerate(ends):
        if groups and index < groups[-1].stop:
            groups[-1] = range(groups[-1].start, max(groups[-1].stop, end))
        else:
            groups.append(range(index, end))
    return groups
