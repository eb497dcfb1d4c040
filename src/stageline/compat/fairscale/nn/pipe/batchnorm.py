"""BatchNorm whose running statistics are those of the batch, not of its microbatches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from stageline.compat.fairscale.nn.pipe.checkpoint import is_recomputing
from stageline.running.batch_norm import Moments, mean_and_variance
from stageline.torch_private import BatchNorm

_Module = TypeVar("_Module", bound=nn.Module)


_Record = dict["DeferredBatchNorm", list[Moments]]

_call: ContextVar[_Record | None] = ContextVar("_call", default=None)
"""What the layers have seen in the call of a Pipe that is running here; None outside of one."""

_committing = threading.Lock()


@contextmanager
def committing_at_the_end() -> Iterator[None]:
    """Run a call of a Pipe; if it succeeds, running statistics follow what its layers have seen."""
    record: _Record = {}
    token = _call.set(record)
    try:
        yield
    finally:
        _call.reset(token)
    with _committing:  # two threads may call one Pipe
        for layer, seen in record.items():
            layer.commit(seen)


class DeferredBatchNorm(BatchNorm):
    """A BatchNorm that normalises each microbatch by itself and keeps statistics of the batch.

    In a Pipe the running statistics change when a call has succeeded, once, by all of its
    microbatches. Alone, they change with every ``chunks``-th call.

    Example:
        >>> layer = DeferredBatchNorm(3, chunks=2)
        >>> a, b = torch.randn(8, 3, 4, 4).chunk(2)
        >>> _ = layer(a), layer(b)
        >>> int(layer.num_batches_tracked)
        1

    Args:
        num_features: The number of channels.
        eps: Added to the variance.
        momentum: How much one batch counts; None for the average of all batches.
        affine: Whether there are a weight and a bias.
        chunks: How many microbatches make a batch.
    """

    draws_nothing = True  # no random numbers

    # R has nothing to put back: another thread's call may change the statistics meanwhile.
    defers_statistics = True

    # In the state_dicts of the original; always zero here.
    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.register_buffer("sum", torch.zeros(num_features))
        self.register_buffer("sum_squares", torch.zeros(num_features))
        self.register_load_state_dict_pre_hook(_without_sums)  # type: ignore[no-untyped-call]
        self.chunks = chunks
        self._seen: list[Moments] = []

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            mean, variance = self.running_mean, self.running_var
            return functional.batch_norm(
                input, mean, variance, self.weight, self.bias, False, 0.0, self.eps
            )
        output = functional.batch_norm(
            input, None, None, self.weight, self.bias, True, 0.0, self.eps
        )
        if not is_recomputing():
            self._note(input)
        return output

    def _note(self, input: Tensor) -> None:
        moments = Moments.of(input, self.momentum or 0.0)
        record = _call.get()
        if record is not None:
            record.setdefault(self, []).append(moments)
            return
        self._seen.append(moments)
        if len(self._seen) >= self.chunks:
            self.commit(self._seen)
            self._seen = []

    @torch.no_grad()
    def commit(self, seen: Sequence[Moments]) -> None:
        """Let the running statistics follow the microbatches of one batch."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # Through .data, which counts no change: a call of another thread may be running.
        self.num_batches_tracked.data.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        mean, variance = mean_and_variance(seen)
        self.running_mean.data.lerp_(mean.to(self.running_mean), share)
        self.running_var.data.lerp_(variance.to(self.running_var), share)

    @classmethod
    def convert_deferred_batch_norm(cls, module: _Module, chunks: int = 1) -> _Module:
        """Replace every BatchNorm with running statistics in a module, and return the module.

        Parameters and running statistics stay the same tensors. A module that is no BatchNorm
        itself is changed in place.

        Args:
            module: A BatchNorm, or what holds some.
            chunks: How many microbatches make a batch.
        """
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        made: nn.Module = module
        if isinstance(module, BatchNorm) and module.track_running_stats:
            made = _deferred(module, chunks)
        for name, child in module.named_children():
            made.add_module(name, cls.convert_deferred_batch_norm(child, chunks))
        return made  # type: ignore[return-value]  # of another class, as in the original


def _deferred(norm: BatchNorm, chunks: int) -> DeferredBatchNorm:
    made = DeferredBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(made, name, getattr(norm, name))
    assert norm.running_mean is not None
    made.sum = torch.zeros_like(norm.running_mean)
    made.sum_squares = torch.zeros_like(norm.running_mean)
    return made.train(norm.training)


def _without_sums(layer: DeferredBatchNorm, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a state_dict of a BatchNorm, and one of the original whatever its sums are."""
    for name in ("sum", "sum_squares"):
        state[prefix + name] = torch.zeros_like(getattr(layer, name))
