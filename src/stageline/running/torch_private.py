"""Every private name of torch that stageline uses, in one place, with the reason.

A new torch release is checked against this file first.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

# What draws without a generator of its own draws from this one; torch.random hands it out too, but
# there a stand-in takes its place while a step runs.
from torch._C import default_generator
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge, Node

# There is no public way to see which modes are active.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# There is no public pytree module in torch; these functions have kept their meaning since 2.1 and
# know the containers that users register (transformers' ModelOutput among them).
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "COMPILED_CALL",
    "NESTED_BACKWARDS",
    "WRAPPER_OF_COMPILED",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "attention_weights",
    "backward_of",
    "default_generator",
    "engine_will_run",
    "foreign_modes",
    "has_gradient_hooks",
    "is_composite",
    "leaf_names",
    "run_backward",
    "saved_tensor_hooks",
    "taken_apart",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "without_overrides",
]

# Where a module keeps what module.compile() made, and what torch.compile(module) returns; importing
# the latter's class would import the compiler.
COMPILED_CALL = "_compiled_call_impl"
WRAPPER_OF_COMPILED = "OptimizedModule"

# Tensor.backward costs a quarter of the speed of small stages, and, being overridable, it leaves
# the function modes that keep random numbers apart; the engine's own entry does neither.
_engine_run_backward = torch.autograd.Variable._execution_engine.run_backward


def run_backward(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Accumulate gradients from these roots into the leaves; the graph is freed on the way."""
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


NESTED_BACKWARDS: frozenset[Any] = frozenset({Tensor.backward, torch.autograd.backward})


def backward_of(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Do what ``backward`` does, but stay in the function modes that are entered."""
    if func is Tensor.backward:
        torch.autograd.backward(args[0], kwargs.pop("gradient"), **kwargs)  # comes back here
        return
    (tensors,), gradients = args, kwargs["grad_tensors"]
    if gradients is None:
        gradients = (None,) * len(tensors)
    create, inputs = kwargs["create_graph"], kwargs["inputs"]
    _engine_run_backward(
        tensors,
        torch.autograd._make_grads(
            tensors,
            (gradients,) if isinstance(gradients, Tensor) else tuple(gradients),
            is_grads_batched=False,
        ),
        create if kwargs["retain_graph"] is None else kwargs["retain_graph"],
        create,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def without_overrides(function: Any) -> Any:
    """Return a function of torch that does what it does when nobody overrides it.

    Otherwise it would ask the modes that are entered, and they must leave before they call it.
    """
    asked = {name: _never for name in _ASKS}
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **asked},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*args: Any) -> bool:
    return False


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the weights of an attention before dropout, computed by torch's own composite."""
    # It multiplies them with a value too: with one of width 0, that costs nothing.
    nothing = key.detach()[..., :0]
    _, weights = torch._scaled_dot_product_attention_math(
        query, key, nothing, mask, 0.0, is_causal, scale=scale
    )
    return weights


def is_composite(operation: OpOverload) -> bool:
    """Return whether an operation is made of others, and so can be taken apart."""
    name = operation.name()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def taken_apart(operation: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a composite operation as its parts; ``decompose`` prefers rewrites in Python."""
    return operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def engine_will_run(node: Node) -> bool:
    """Return whether the backward that runs now also reaches a node; asked from inside of it."""
    return bool(torch._C._will_engine_execute_node(node))


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return this thread's pack and unpack hooks; torch has no public getter."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a hook is called with the gradient of a parameter; torch only adds them."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def foreign_modes() -> list[str]:
    """Return the modes that intercept torch in this thread, but for the default device."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


def leaf_names(tree: Any, *, root: str) -> list[str]:
    """Return a readable name for every leaf.

    Example:
        >>> leaf_names((1, {"mask": 2}), root="args")
        ['args[0]', "args[1]['mask']"]
    """
    return [root + keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]
