"""torch's most common layers, each as a function that reads the layer as it is at that moment.

Whatever is not by far the most common case is left to the layer itself: a tensor is of a class of
its own, a mode looks on, sizes are wrong. Who calls such a function has looked for hooks before.
What meets weights is one of the operations that are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional as F
from torch.overrides import has_torch_function

from stageline.capturing.direct.entrances import Entrance
from stageline.capturing.direct.operations import TORCH, Call, Operations
from stageline.capturing.streams.tracking import original_call
from stageline.torch_private import CALL, cudnn_is_enabled, hooks_of

Make = Callable[[Any, Operations], Call]


def _linear(module: Any, operations: Operations) -> Call:
    parameters, linear, whole = module._parameters, operations.linear, operations.whole(module)

    def call(input: Any) -> Any:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # an attribute by now, as pruning makes it
            return whole(input)
        return linear(input, weight, bias)

    return call


def entering(module: Any, entrance: Entrance) -> Call:
    """Return the function of an ``nn.Linear`` that meets the input of a stage."""
    parameters, linear = module._parameters, _linear(module, TORCH)

    def call(input: Any) -> Any:
        guest = entrance.met(input)
        if guest is None:
            return linear(input)
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            return module(input)
        return guest.meet(input, weight, bias)

    return call


def _convolution(name: str) -> Make:
    def make(module: Any, operations: Operations) -> Call:
        own, parameters = vars(module), module._parameters
        function, whole = getattr(operations, name), operations.whole(module)

        def call(input: Any) -> Any:
            try:
                weight, bias, mode = parameters["weight"], parameters["bias"], own["padding_mode"]
                stride, padding = own["stride"], own["padding"]
                dilation, groups = own["dilation"], own["groups"]
            except KeyError:
                return whole(input)
            if mode != "zeros":
                return whole(input)
            return function(input, weight, bias, stride, padding, dilation, groups)

        return call

    return make


def _relu(module: Any, _: Operations) -> Call:
    own = vars(module)

    def call(input: Any) -> Any:
        if own.get("inplace") is not False or has_torch_function((input,)):
            return module(input)
        return torch.relu(input)

    return call


def _layer_norm(module: Any, operations: Operations) -> Call:
    own, parameters = vars(module), module._parameters
    layer_norm, whole = operations.layer_norm, operations.whole(module)

    def call(input: Any) -> Any:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
            shape, eps = own["normalized_shape"], own["eps"]
        except KeyError:
            return whole(input)
        if has_torch_function((input, weight, bias)):
            return whole(input)
        return layer_norm(input, shape, weight, bias, eps, cudnn_is_enabled())

    return call


def _number_of(count: Any) -> tuple[Any, int, Any]:
    """Return a number of batches, its address and its memory; nothing if it is not an ordinary one.

    An operation of torch takes 8 us to add 1 to it when all is cold.
    """
    is_plain = type(count) is Tensor and count.is_cpu and count.layout is torch.strided
    if not is_plain or count.dtype is not torch.int64 or count.dim() or count.is_inference():
        return None, 0, None
    return count, count.data_ptr(), memoryview(count.detach().view(1).numpy())


def _batch_norm(*dims: int) -> Make:
    def make(module: Any, operations: Operations) -> Call:
        own, parameters, buffers = vars(module), module._parameters, module._buffers
        batch_norm, whole = operations.batch_norm, operations.whole(module)
        counted, address, number = _number_of(None)

        def call(input: Any) -> Any:
            nonlocal counted, address, number
            try:
                keeps = own["training"] and own["track_running_stats"]
                momentum, eps = own["momentum"], own["eps"]
                weight, bias = parameters["weight"], parameters["bias"]
                mean, var = buffers["running_mean"], buffers["running_var"]
                count = buffers["num_batches_tracked"]
            except KeyError:
                return whole(input)
            if (
                not keeps
                or momentum is None
                or count is None
                or eps <= 0
                or has_torch_function((input, mean, var, weight, bias))
            ):
                return whole(input)
            shape = input.shape
            if len(shape) not in dims or shape.numel() <= shape[1]:  # at most a value per channel
                return whole(input)
            if count is counted and count.data_ptr() == address:
                number[0] += 1
                increment_version(count)
            else:
                count.add_(1)
                counted, address, number = _number_of(count)
            return batch_norm(
                input, weight, bias, mean, var, True, momentum, eps, cudnn_is_enabled()
            )

        return call

    return make


LAYERS: dict[type[nn.Module], Make] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution("conv1d"),
    nn.Conv2d: _convolution("conv2d"),
    nn.Conv3d: _convolution("conv3d"),
    nn.ReLU: _relu,
    nn.LayerNorm: _layer_norm,
    nn.BatchNorm1d: _batch_norm(2, 3),
    nn.BatchNorm2d: _batch_norm(4),
    nn.BatchNorm3d: _batch_norm(5),
}
"""What makes the function of a layer; it takes one argument."""


def sequential(
    module: nn.Module, calls: Sequence[tuple[nn.Module, Call]], operations: Operations
) -> Call:
    """Return what runs the layers of a Sequential; those that it has got since, as they are.

    Args:
        module: The Sequential.
        calls: Its layers, and what to call instead of each.
        operations: What meets weights.
    """
    layers: Mapping[str, Any] = module._modules
    count, whole = len(calls), operations.whole
    steps = [(call, layer, *hooks_of(layer)) for layer, call in calls]

    def call(input: Any) -> Any:
        if len(layers) != count:
            return whole(module)(input)
        # Looked up one by one, as the Sequential does: a layer may replace the next one.
        for now, (direct, layer, hooks, pre_hooks, back_hooks, back_pre_hooks) in zip(
            layers.values(), steps, strict=True
        ):
            if now is not layer or hooks or pre_hooks or back_hooks or back_pre_hooks:
                input = whole(now)(input)
            else:
                input = direct(input)
        return input

    return call


# What the functions above stand for, and what they leave out.
methods_of = attrgetter("__call__", "__getattr__", "__getattribute__", "forward")
"""What a call of a module of some class goes through, as the class has it now."""
_FUNCTIONS = [
    *((F, name) for name in ("linear", "conv1d", "conv2d", "conv3d")),
    *((F, name) for name in ("relu", "layer_norm", "batch_norm")),
    *((torch, name) for name in ("layer_norm", "batch_norm")),
    *((kind, "_conv_forward") for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *((kind, "_check_input_dim") for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
]


def functions() -> list[Any]:
    """Return what calls of layers go through besides, as torch has it now."""
    return [original_call(), *(getattr(owner, name) for owner, name in _FUNCTIONS)]


def is_as_known(module: nn.Module) -> bool:
    """Whether a layer, or a Sequential, is what torch makes of it: nobody has replaced a part."""
    is_same = methods_of(type(module)) == _KNOWN_METHODS[type(module)]
    return is_same and _OVERRIDES.isdisjoint(vars(module))


def are_as_known() -> bool:
    """Whether torch is as it was, and nobody was here before this import."""
    return _ARE_TORCHS_OWN and functions() == _KNOWN_FUNCTIONS


_OVERRIDES = frozenset(
    ("_conv_forward", "_check_input_dim", CALL, "weight", "bias", "running_mean", "running_var")
)
_KNOWN_METHODS = {kind: methods_of(kind) for kind in (*LAYERS, nn.Sequential)}
_KNOWN_FUNCTIONS = functions()
_ARE_TORCHS_OWN = all(
    each.__module__.startswith("torch")
    for each in (*_KNOWN_FUNCTIONS, *(methods[-1] for methods in _KNOWN_METHODS.values()))
    if isinstance(each, FunctionType)
)
