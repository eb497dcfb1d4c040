"""From an ``nn.Sequential`` and a balance to partitions on devices; and what is wrong with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from stageline.partitioning.sharing import find_shared

Device = torch.device | int | str


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
    """Return the device of each partition; without any given, accelerators, or the CPU.

    Raises:
        IndexError: There are fewer devices than partitions.
        RuntimeError: One that would be used is not there.
        TypeError: It is one device, not one for each partition.
    """
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f"devices={devices!r}: wanted one for each partition, like ['cpu', 'cpu']")
    found = _all_devices(num_partitions) if devices is None else list(devices)
    if num_partitions > len(found):
        raise IndexError(
            "too few devices to hold given partitions "
            f"(devices: {len(found)}, partitions: {num_partitions})"
        )
    return [_device(device) for device in found[:num_partitions]]


def _all_devices(num_partitions: int) -> list[Device]:
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return ["cpu"] * num_partitions
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def _device(given: Device) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises both if CUDA is missing
        raise RuntimeError(
            f"there is no device {given!r} to use ({error}): leave devices= out, or name devices "
            "of this machine, like ['cpu', 'cpu']"
        ) from error
    return device


def read_balance(balance: Iterable[float], num_layers: int) -> list[int]:
    """Return the number of layers of each partition.

    Raises:
        TypeError: They are no numbers.
        ValueError: They are not positive, or not as many as the model has.
    """
    try:
        given = list(balance)
        total = sum(given)
    except TypeError:
        raise TypeError(
            f"balance={balance!r}: wanted the number of layers of each partition, like [2, 1]"
        ) from None
    if num_layers != total:
        raise ValueError(
            "module and sum of balance have different length "
            f"(module: {num_layers}, sum of balance: {total})"
        )
    if any(count <= 0 or count != int(count) for count in given):
        raise ValueError(f"all balance numbers must be positive integer (balance: {given})")
    return [int(count) for count in given]


def verify_sharing(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> None:
    """Check that each parameter is on one device.

    Raises:
        ValueError: Partitions on different devices share one.
    """
    places = [device for count, device in zip(balance, devices, strict=True) for _ in range(count)]
    homes: dict[nn.Parameter, torch.device] = {}
    for layer, device in zip(module, places, strict=True):
        for parameter in layer.parameters():
            if homes.setdefault(parameter, device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported"
                )


def split(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> nn.ModuleList:
    """Return the partitions: the same layers under the same names, each partition on its device."""
    layers = iter(module.named_children())
    return nn.ModuleList(
        nn.Sequential(OrderedDict(next(layers) for _ in range(count))).to(device)
        for count, device in zip(balance, devices, strict=True)
    )


def group(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[range]:
    """Return which partitions make one stage of the pipeline: those that share memory.

    The pipeline would run a copy of a layer whose weight two stages use, without the hooks that are
    put on the layer later, and two parameters over one memory would get one gradient. Between the
    first and the last partition that share a tensor, all are one stage, if they are on one device.

    Example:
        >>> first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        >>> second.weight = first.weight
        >>> group([first, second, third], [torch.device("cpu")] * 3)
        [range(0, 2), range(2, 3)]
    """
    ends = list(range(1, len(partitions) + 1))
    for shared in find_shared([(index, "", each) for index, each in enumerate(partitions)])[0]:
        first, last = shared.stages[0], shared.stages[-1]
        if len(set(devices[first : last + 1])) == 1:
            ends[first] = max(ends[first], last + 1)
    groups: list[range] = []
    for index, end in enumerate(ends):
        if groups and index < groups[-1].stop:
            groups[-1] = range(groups[-1].start, max(groups[-1].stop, end))
        else:
            groups.append(range(index, end))
    return groups
