"""Compiled code runs uncompiled where a pipeline follows its calls, for draws or for statistics.

What draws would use the generator that all ranks share. The compiler would also trace through what
follows calls and redirects draws, and keep the keys of one microbatch for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

from torch import nn

from stageline import log
from stageline.capturing.interception import compiler_off
from stageline.torch_private import COMPILED_CALL, WRAPPER_OF_COMPILED, compiler_is_loaded

DRAWS = (
    "the pipeline draws random numbers, and compiled code would draw them from a generator that "
    "all ranks share: set dropout to 0, or leave the module uncompiled"
)
_warned: WeakSet[nn.Module] = WeakSet()  # each is spoken of once


def compiled_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are compiled, by ``torch.compile`` or by ``module.compile()``."""
    # Importing the compiler takes seconds; if nobody did, nothing is compiled.
    if not compiler_is_loaded():
        return []
    return [m for m in modules if _is_wrapper(m) or getattr(m, COMPILED_CALL) is not None]


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == WRAPPER_OF_COMPILED


@contextmanager
def uncompiled(modules: Sequence[nn.Module], reason: str = DRAWS) -> Iterator[None]:
    """Let everything run uncompiled, also functions.

    Args:
        modules: Those that are compiled.
        reason: For people: why, and what to do.
    """
    if not compiler_is_loaded():
        yield
        return
    _warn(modules, reason)
    in_place = [module for module in modules if not _is_wrapper(module)]
    calls = [getattr(module, COMPILED_CALL) for module in in_place]
    try:
        for module in in_place:  # their compiled call would not be followed
            setattr(module, COMPILED_CALL, None)
        with compiler_off():
            yield
    finally:
        for module, call in zip(in_place, calls, strict=True):
            setattr(module, COMPILED_CALL, call)


def _warn(modules: Sequence[nn.Module], reason: str) -> None:
    for module in modules:
        if module not in _warned:
            _warned.add(module)
            inner = next(module.children()) if _is_wrapper(module) else module
            log.warning(0, f"a compiled {type(inner).__name__} runs uncompiled, because {reason}")
