"""torch's most common layers, each as a function that reads the layer as it is at that moment.

Whatever is not by far the most common case is left to the layer itself: somebody listens to it, a
tensor is of a class of its own, a mode looks on, sizes are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import has_torch_function

from stageline.torch_private import cudnn_is_enabled, hooks_of

Call = Callable[..., Any]


def _linear(module: Any) -> Call:
    hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)
    parameters = module._parameters

    def call(input: Any) -> Any:
        if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            return module(input)
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # an attribute by now, as pruning makes it
            return module(input)
        return F.linear(input, weight, bias)

    return call


def _convolution(function: Call) -> Callable[[Any], Call]:
    def make(module: Any) -> Call:
        hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)
        own, parameters = vars(module), module._parameters

        def call(input: Any) -> Any:
            if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
                return module(input)
            try:
                weight, bias = parameters["weight"], parameters["bias"]
            except KeyError:
                return module(input)
            if own["padding_mode"] != "zeros":
                return module(input)
            return function(
                input, weight, bias, own["stride"], own["padding"], own["dilation"], own["groups"]
            )

        return call

    return make


def _relu(module: Any) -> Call:
    hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)
    own = vars(module)

    def call(input: Any) -> Any:
        if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            return module(input)
        if own["inplace"] or has_torch_function((input,)):
            return module(input)
        return torch.relu(input)

    return call


def _layer_norm(module: Any) -> Call:
    hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)
    own, parameters = vars(module), module._parameters

    def call(input: Any) -> Any:
        if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            return module(input)
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            return module(input)
        if has_torch_function((input, weight, bias)):
            return module(input)
        shape, eps = own["normalized_shape"], own["eps"]
        return torch.layer_norm(input, shape, weight, bias, eps, cudnn_is_enabled())

    return call


def _batch_norm(*dims: int) -> Callable[[Any], Call]:
    def make(module: Any) -> Call:
        hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)
        own, parameters, buffers = vars(module), module._parameters, module._buffers

        def call(input: Any) -> Any:
            if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
                return module(input)
            if not (own["training"] and own["track_running_stats"]) or input.dim() not in dims:
                return module(input)
            momentum, eps = own["momentum"], own["eps"]
            try:
                weight, bias = parameters["weight"], parameters["bias"]
                mean, var = buffers["running_mean"], buffers["running_var"]
                count = buffers["num_batches_tracked"]
            except KeyError:
                return module(input)
            if (
                momentum is None
                or count is None
                or eps <= 0
                or input.numel() <= input.shape[1]  # a single value, or none, for each channel
                or has_torch_function((input, mean, var, weight, bias))
            ):
                return module(input)
            count.add_(1)
            return torch.batch_norm(
                input, weight, bias, mean, var, True, momentum, eps, cudnn_is_enabled()
            )

        return call

    return make


LAYERS: dict[type[nn.Module], Callable[[Any], Call]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution(F.conv1d),
    nn.Conv2d: _convolution(F.conv2d),
    nn.Conv3d: _convolution(F.conv3d),
    nn.ReLU: _relu,
    nn.LayerNorm: _layer_norm,
    nn.BatchNorm1d: _batch_norm(2, 3),
    nn.BatchNorm2d: _batch_norm(4),
    nn.BatchNorm3d: _batch_norm(5),
}
"""What makes the function of a layer."""


def sequential(module: nn.Sequential, calls: list[Call]) -> Call:
    """Return what runs the layers of a Sequential, given what calls each of them."""
    hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks_of(module)

    def call(input: Any) -> Any:
        if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            return module(input)
        for each in calls:
            input = each(input)
        return input

    return call


def are_as_known() -> bool:
    """Whether torch still is what the functions above stand for: nobody has replaced a part."""
    return _parts() == _KNOWN and _ARE_TORCHS_OWN


def _parts() -> tuple[Any, ...]:
    called = (nn.Module.__call__, nn.Module.__getattr__)
    return (*called, F.conv1d, F.conv2d, F.conv3d, F.relu, F.layer_norm, F.batch_norm)


_KNOWN = _parts()
# Somebody may have been here before this import.
_WRITTEN_IN_PYTHON = (F.relu, F.layer_norm, F.batch_norm)
_ARE_TORCHS_OWN = all(each.__module__ == F.__name__ for each in _WRITTEN_IN_PYTHON)
