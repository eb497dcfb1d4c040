"""Pipe: an ``nn.Sequential`` that runs as a pipeline."""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn.pipe.batchnorm import DeferredBatchNorm, committing_at_the_end
from stageline.compat.fairscale.nn.pipe.microbatch import (
    Stage,
    Value,
    check,
    chunk_sizes,
    join,
    num_rows,
)
from stageline.compat.fairscale.nn.pipe.skip.carrying import carrying
from stageline.compat.fairscale.nn.pipe.skip.layout import crossing
from stageline.compat.fairscale.nn.pipe.skip.skippable import verify_skippables
from stageline.compat.fairscale.nn.pipe.splitting import (
    Device,
    find_devices,
    group,
    read_balance,
    split,
    verify_module,
    verify_sharing,
)
from stageline.errors import StepError
from stageline.pipeline import Pipeline
from stageline.running.caller import refuse_foreign_modes

__all__ = ["Pipe"]

_CPU = torch.device("cpu")
_Content = tuple[Mapping[str, object], tuple[object, ...]]


class Pipe(nn.Module):
    """An ``nn.Sequential`` whose partitions run at the same time, each on a microbatch of its own.

    Example:
        >>> model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
        >>> pipe = Pipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> pipe(torch.randn(20, 10)).sum().backward()
        >>> [name for name, _ in pipe.named_parameters()][:2]
        ['partitions.0.0.weight', 'partitions.0.0.bias']

    Args:
        module: The model. Its layers are used as they are, not copied.
        balance: The number of layers of each partition.
        devices: The device of each partition; more are dropped. All accelerators if left out, the
            CPU for every partition if there is none.
        chunks: Into how many microbatches a batch is cut, as ``torch.chunk`` does.
        checkpoint: Which microbatches keep no activations and are computed again in the backward:
            ``"always"`` all, ``"except_last"`` all but microbatch ``chunks - 1``, ``"never"`` none.
            None in eval mode.
        deferred_batch_norm: Whether the running statistics of BatchNorm follow the batch, not its
            microbatches.

    Attributes:
        partitions: The partitions, an ``nn.ModuleList`` of ``nn.Sequential``.
        balance: The number of layers of each partition.
        devices: The device of each partition; the output is on the last one.
        chunks: As given.
        checkpoint: As given.
    """

    _called: ClassVar[str] = "Pipe"
    _home: ClassVar[str] = "stageline.compat.fairscale.nn.pipe"

    balance: list[int] = []  # noqa: RUF012  # as in the original, where documentation needs them
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: str = "except_last"

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[float] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError(self._advice("balance is required"))
        if self.chunks <= 0:
            raise ValueError("number of chunks must be positive integer")
        if self.checkpoint not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        self._verify(module)
        verify_skippables(module)
        try:
            self.balance = read_balance(balance, len(module))
        except ValueError as error:
            raise ValueError(self._advice(str(error))) from None
        self.devices = find_devices(devices, len(self.balance))
        verify_sharing(module, self.balance, self.devices)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self.partitions = split(module, self.balance, self.devices)
        self.register_load_state_dict_pre_hook(_rename_keys)  # type: ignore[no-untyped-call]
        self._reset()

    def _verify(self, module: nn.Sequential) -> None:
        verify_module(module)

    def _advice(self, message: str) -> str:
        package = self._home.removesuffix(".pipe")
        return (
            f"{message}\n\n"
            f"How many layers each partition should have can be measured with {self._home}.balance"
            ":\n\n"
            f"  from {package} import {self._called}\n"
            f"  from {self._home}.balance import balance_by_time\n\n"
            "  sample = torch.empty(...)  # the size of a microbatch\n"
            "  balance = balance_by_time(partitions, model, sample)\n"
            f"  model = {self._called}(model, balance, ...)\n"
        )

    def _reset(self) -> None:
        """Forget the pipelines; the next call builds them for the layers as they are then."""
        self._building = threading.Lock()
        self._pipelines: dict[tuple[bool, int, str], Pipeline] = {}
        self._built_of: list[_Content] = []

    def forward(self, input: Value) -> Value:
        """Run a batch: a tensor, or a tuple of tensors with the same number of rows."""
        check(input)
        if not len(self.partitions):
            return input
        rows = num_rows(input)
        try:
            with committing_at_the_end():
                output: Value = self._pipeline()(input) if rows else self._run_plainly(input)
        except StepError as error:  # what a layer raises comes as itself
            if self.checkpoint != "never":
                hint = '(In a Pipe, checkpoint="never" recomputes nothing.)'
                error.hint = f"{error.hint} {hint}".strip()
            raise
        return output

    def _run_plainly(self, value: Any) -> Any:
        """Run a batch without rows, which makes no microbatches."""
        with carrying({}):
            for partition, device in zip(self.partitions, self.devices, strict=True):
                leaves = value if isinstance(value, tuple) else (value,)
                moved = tuple(leaf.to(device) for leaf in leaves)
                value = partition(moved if isinstance(value, tuple) else moved[0])
        return value

    def _pipeline(self) -> Pipeline:
        """Return the pipeline of the current mode: in eval mode nothing is recomputed."""
        settings = (self.training, self.chunks, self.checkpoint)
        with self._building:
            if not all(map(_is_unchanged, self._built_of)):
                self._pipelines = {}
            if not self._pipelines:
                self._built_of = _contents(self.partitions)
            if settings not in self._pipelines:
                self._pipelines[settings] = self._build(*settings)
            return self._pipelines[settings]

    def _build(self, training: bool, chunks: int, checkpoint: str) -> Pipeline:
        refuse_foreign_modes()  # tensors made under a transform of torch.func end with it
        stop = {"always": chunks, "except_last": chunks - 1, "never": 0}[checkpoint]
        groups = group(list(self.partitions), self.devices)
        leaving = crossing(list(self._sequentials()))
        stages = [
            Stage(
                {number: self.partitions[number] for number in numbers},
                leaving[numbers.start - 1] if numbers.start else (),
                leaving[numbers.stop - 1],
            )
            for numbers in groups
        ]
        on = [self.devices[numbers.start] for numbers in groups]
        return Pipeline.from_stages(
            stages,
            transport="memory",
            devices=[_CPU if device.type == "cpu" else device for device in on],
            num_microbatches=chunks,
            schedule="gpipe",
            recompute=lambda stage, microbatch: training and microbatch < stop,
            microbatch_sizes=chunk_sizes,
            merge_outputs=join,
            original_errors=True,
        )

    def __len__(self) -> int:
        """Return the number of layers."""
        return sum(len(partition) for partition in self._sequentials())

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer by its place in the model."""
        layers = list(self)
        position = operator.index(index)
        if not -len(layers) <= position < len(layers):
            raise IndexError
        return layers[position]

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the layers."""
        for partition in self._sequentials():
            yield from partition

    def _sequentials(self) -> Iterator[nn.Sequential]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield partition

    def _refuse_moving(self) -> NoReturn:
        raise TypeError(
            "denied to move parameters and buffers, "
            f"because {self._called} should manage device placement"
        )

    def cuda(self, device: Any = None) -> NoReturn:
        self._refuse_moving()

    def cpu(self) -> NoReturn:
        self._refuse_moving()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast to a dtype; moving to a device is refused."""
        moves = args and isinstance(args[0], (torch.device, int, str, Tensor))
        if moves or "device" in kwargs or "tensor" in kwargs or "other" in kwargs:
            self._refuse_moving()
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._reset()  # buffers are other tensors now
        return applied

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the pipelines: a copy builds its own."""
        built = ("_building", "_pipelines", "_built_of")
        return {name: value for name, value in vars(self).items() if name not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        self._reset()


def _contents(root: nn.Module) -> list[_Content]:
    """Return what every module holds: a layer or a parameter may be replaced after a call."""
    tables = [t for module in root.modules() for t in (module._modules, module._parameters)]
    return [(table, tuple(table.values())) for table in tables]


def _is_unchanged(content: _Content) -> bool:
    table, before = content
    return len(table) == len(before) and all(map(operator.is_, table.values(), before))


def _rename_keys(pipe: Pipe, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Give the entries of a state_dict the names of this Pipe before it is loaded.

    It may come from a plain ``nn.Sequential``, ``2.weight``, or from a Pipe with another balance,
    ``partitions.1.2.weight``.
    """
    homes = {
        name: f"{prefix}partitions.{number}.{name}"
        for number, partition in enumerate(pipe.partitions)
        for name, _ in partition.named_children()
    }
    for key in [key for key in state if key.startswith(prefix)]:
        plain = re.sub(r"^partitions\.\d+\.", "", key[len(prefix) :])
        layer, dot, rest = plain.partition(".")
        if layer in homes and dot:
            state[f"{homes[layer]}.{rest}"] = state.pop(key)
