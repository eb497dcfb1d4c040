"""An ``nn.Sequential`` is a chain of blocks already; nothing has to be recorded."""

from __future__ import annotations

from torch import nn

from stageline.capturing.graph import Block, Graph

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def capture_sequential(model: nn.Sequential, *, at_least: int = 1) -> Graph:
    """Return the children of a Sequential as blocks.

    Args:
        model: The model; it is not changed.
        at_least: How many blocks are wanted. If the model has fewer children, Sequentials among
            them are opened as well.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
        >>> [block.name for block in capture_sequential(model).blocks]
        ['0', '1']
        >>> [block.name for block in capture_sequential(model, at_least=3).blocks]
        ['0.0', '0.1', '1']
    """
    blocks = _children("", model)
    while len(blocks) < at_least:
        opened = [inner for block in blocks for inner in _opened(block)]
        if len(opened) == len(blocks) and all(a is b for a, b in zip(opened, blocks, strict=True)):
            break
        blocks = opened
    return Graph(tuple(blocks))


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module is a Sequential and nothing more: no forward of its own, no hooks."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)  # some libraries replace it on the object
        and not has_hooks(module)
        and not own_tensors(module)
    )


def own_tensors(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that the module itself holds."""
    return [*module._parameters, *module._buffers]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _children(prefix: str, model: nn.Sequential) -> list[Block]:
    # Not named_children(), which leaves out a module that stands in the chain for the second time.
    return [
        Block(f"{prefix}{name}", child)
        for name, child in model._modules.items()
        if child is not None
    ]


def _opened(block: Block) -> list[Block]:
    if not is_plain_sequential(block.module) or not len(block.module):  # type: ignore[arg-type]  # a Sequential
        return [block]
    assert isinstance(block.module, nn.Sequential)
    return _children(f"{block.name}.", block.module)
