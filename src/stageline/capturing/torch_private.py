"""Every private name of torch that a recording uses, in one place, with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# There is no public pytree module in torch; these have kept their meaning since 2.1.
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

# Where torch keeps functions that it has no public name for; models reach them through others.
native_functions = torch._C._nn

# What nn.Module.__call__ calls, hooks included; dynamo and torch.fx know it by this name too.
CALL = "_call_impl"

__all__ = [
    "CALL",
    "SUPPORTED_NODES",
    "GetAttrKey",
    "MappingKey",
    "SequenceKey",
    "TorchDispatchMode",
    "TreeSpec",
    "functorch_level",
    "native_functions",
    "register_dataclass",
    "storage_of",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_unflatten",
]


def storage_of(tensor: Tensor) -> int:
    """Return which memory a tensor lies in; on meta, where addresses are 0, which storage."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def functorch_level() -> Any:
    """Return the innermost active functorch transform (vmap, grad), or None."""
    return torch._C._functorch.peek_interpreter_stack()
