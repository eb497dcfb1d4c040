"""A block of the user's own, and who is called while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from stageline.capturing.streams.tracking import FOLLOWS
from stageline.torch_private import CALL


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1)
        self.around = nn.Sequential(nn.Conv2d(narrow, wide, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second(hidden) + self.around(x))


@contextmanager
def calls_of_modules() -> Iterator[list[nn.Module]]:
    """Note the modules that are called, in all threads."""
    calls: list[nn.Module] = []
    before = getattr(nn.Module, CALL)

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return before(module, *args, **kwargs)

    setattr(noted, FOLLOWS, before)  # else it would be one more reason to call modules
    setattr(nn.Module, CALL, noted)
    try:
        yield calls
    finally:
        setattr(nn.Module, CALL, before)
