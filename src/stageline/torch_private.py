"""Every private name of torch that stageline uses, in one place, with the reason.

A new torch release is checked against this file first; tests/test_layers.py sees to it that no
other file names what is private in torch. Members of torch's objects are used where they stand,
for want of a public way, and only these:

    tensor._version            whether a tensor has been written to since it was last looked at
    module._parameters, _buffers, _modules
                               what a module itself holds, also under several names and as None
    module._non_persistent_buffers_set
                               which buffers are not part of the state_dict
    module._forward_pre_hooks, _forward_hooks, _backward_pre_hooks, _backward_hooks
                               who listens to a module; torch only adds and removes
    state_dict._metadata       the versions that load_state_dict migrates by
    autocast._enabled, _cache_enabled
                               what a region of autocast was entered with
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

# What draws without a generator of its own draws from this one; torch.random hands it out too, but
# there a stand-in takes its place while a step runs.
from torch._C import default_generator

# torch.distributed has these without exporting them: the store of a job, a part of one, and the
# group that a pipeline makes and drops by itself.
from torch._C._distributed_c10d import PrefixStore, Store

# Where a vmap begins; torch.func.vmap and torch.vmap call it by the name in this module, so that
# it is the one place to record a vmap as one step.
from torch._functorch import apis as functorch_apis

# What a dispatch mode is asked about; the way to tell an operation with a generator from others.
from torch._ops import OpOverload

# Tensors that have a shape and a device and no numbers; torch.device("meta") has no such device.
from torch._subclasses.fake_tensor import FakeTensorMode

# The class between an autograd function and what is written in C++.
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_store

# What all BatchNorm layers are, whatever their number of dimensions.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Whether somebody listens to every module there is.
from torch.nn.modules.module import _has_any_global_hook

# There is no public way to see which modes are active.
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as checkpoint_module
from torch.utils._device import DeviceContext

# The only way to see what a call writes to, and how much it computes, below autograd.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# There is no public pytree module in torch; these have kept their meaning since 2.1 and know the
# containers that users register (transformers' ModelOutput among them).
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "CALL",
    "CHECKPOINT_GENERATOR",
    "COMPILED_CALL",
    "CPU_ATTENTION",
    "GRADIENT_HOOKS",
    "MODULE_HOOKS",
    "NESTED_BACKWARDS",
    "SUPPORTED_NODES",
    "WRAPPER_OF_COMPILED",
    "BatchNorm",
    "DisableTorchFunction",
    "FakeTensorMode",
    "GetAttrKey",
    "MappingKey",
    "OpOverload",
    "PrefixStore",
    "SequenceKey",
    "Store",
    "TorchDispatchMode",
    "TreeSpec",
    "attention_weights",
    "backward_of",
    "checkpoint_module",
    "compiler_is_loaded",
    "connect_gloo",
    "copy_all",
    "cudnn_is_enabled",
    "default_generator",
    "default_store",
    "engine_will_run",
    "foreign_modes",
    "functorch_apis",
    "functorch_level",
    "gradients_of",
    "has_gradient_hooks",
    "hooks_of",
    "is_bare",
    "is_composite",
    "leaf_names",
    "native_functions",
    "own_connection",
    "register_dataclass",
    "run_backward",
    "saved_tensor_hooks",
    "set_grad_enabled",
    "storage_of",
    "taken_apart",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "without_overrides",
]

# Attention on the CPU, forward and backward: torch's counter of operations leaves it out.
CPU_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)

# What a recording does on its own account must not be recorded. The public
# DisableTorchFunctionSubclass leaves the modes on.
DisableTorchFunction = torch._C.DisableTorchFunction

# What torch.set_grad_enabled, no_grad and enable_grad call, as a function mode sees it.
set_grad_enabled = torch._C._set_grad_enabled

# In checkpoint_module: runs the function of a non-reentrant checkpoint; there is no public hook.
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"

# Where torch keeps functions that it has no public name for; models reach them through others.
native_functions = torch._C._nn

# What nn.Module.__call__ calls, hooks included; dynamo and torch.fx know it by this name too.
CALL = "_call_impl"

# Where a module keeps what module.compile() made, and what torch.compile(module) returns; importing
# the latter's class would import the compiler.
COMPILED_CALL = "_compiled_call_impl"
WRAPPER_OF_COMPILED = "OptimizedModule"


def copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy tensors into others: in one call, which for small ones is most of the time."""
    torch._foreach_copy_(targets, sources)


# Tensor.backward costs a quarter of the speed of small stages, and, being overridable, it leaves
# the function modes that keep random numbers apart; the engine's own entry does neither.
_engine_run_backward = torch.autograd.Variable._execution_engine.run_backward


def run_backward(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor] = (),
) -> None:
    """Accumulate gradients from these roots into the leaves; the graph is freed on the way.

    Args:
        leaves: Which of them, where not all.
    """
    # Not kept, not itself differentiable, unreachable leaves allowed, accumulated into leaves. By
    # position: names cost a microsecond.
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, tuple(leaves), True, True)


MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps those who listen to its calls."""


def hooks_of(module: torch.nn.Module) -> tuple[Any, Any, Any, Any]:
    """Return the tables of those who listen to a module: torch only adds and removes."""
    one, two, three, four = (getattr(module, hooks) for hooks in MODULE_HOOKS)
    return one, two, three, four


# What torch.backends.cudnn.enabled asks, six functions further down.
cudnn_is_enabled = torch._C._get_cudnn_enabled


def is_bare(module: torch.nn.Module) -> bool:
    """Whether a call of a module is its forward, and nobody listens.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> is_bare(layer)
        True
        >>> handle = layer.register_forward_hook(print)
        >>> is_bare(layer)
        False
    """
    own = vars(module)
    if "forward" in own or own.get(COMPILED_CALL) is not None or _has_any_global_hook():
        return False
    return not any(hooks_of(module))


def applier(function: type[torch.autograd.Function]) -> Any:
    """Return what applies an autograd function of our own, without asking for functorch first.

    Nobody transforms the place where a stage begins, and ``apply`` takes half as long again. In
    backward the engine is given our function itself, not one that looks for it every time.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]  # by its metaclass
    return super(_SingleLevelFunction, function).apply  # type: ignore[misc]  # its own class


def gradients_of(
    root: GradientEdge, gradient: Tensor, inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of some inputs as they come; the graph stays for another backward.

    ``torch.autograd.grad`` does the same and takes twice as long around a small operation.
    """
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        (root,),
        (gradient,),
        True,  # keep_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


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


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group outside of torch's own list of groups; it ends when it is dropped.

    ``torch.distributed.new_group`` would keep it for ever, and its name for the next one.
    """
    return ProcessGroupGloo(store, rank, size, timeout)


def default_store() -> Store:
    """Return the store through which the processes of the job have found each other."""
    store: Store = _get_default_store()
    return store


def own_connection(store: Store) -> Store:
    """Return the same store over a connection of its own; before torch 2.8 there is no such way."""
    if not hasattr(store, "clone"):
        return store
    clone: Store = store.clone()
    return clone


def engine_will_run(node: Node) -> bool:
    """Return whether the backward that runs now also reaches a node; asked from inside of it."""
    return bool(torch._C._will_engine_execute_node(node))


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return this thread's pack and unpack hooks; torch has no public getter."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a parameter


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a hook is called with the gradient of a parameter; torch only adds them."""
    return any(getattr(parameter, name) for name in GRADIENT_HOOKS)


def foreign_modes() -> list[type]:
    """Return the classes of the modes that intercept torch in this thread, but for devices."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode) for mode in modes if not isinstance(mode, DeviceContext)]


def leaf_names(tree: Any, *, root: str) -> list[str]:
    """Return a readable name for every leaf.

    Example:
        >>> leaf_names((1, {"mask": 2}), root="args")
        ['args[0]', "args[1]['mask']"]
    """
    return [root + keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]


def storage_of(tensor: Tensor) -> int:
    """Return which memory a tensor lies in; on meta, where addresses are 0, which storage."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def functorch_level() -> Any:
    """Return the innermost active functorch transform (vmap, grad), or None."""
    return torch._C._functorch.peek_interpreter_stack()


def compiler_is_loaded() -> bool:
    """Return whether anybody has imported the compiler, which takes seconds."""
    return "torch._dynamo" in sys.modules
