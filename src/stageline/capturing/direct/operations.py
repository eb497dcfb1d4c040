"""What a layer that is called directly does with its weights: torch's own operations, or others.

Whoever has to follow what becomes of weights gives operations of their own. Layers with weights
then use these, layers without any are called as ever, and code of which nothing is known goes
through ``whole``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Call = Callable[..., Any]


class Operations:
    """Torch's own operations: nobody follows weights.

    Attributes:
        follows: Whether somebody does, so that code may not be run outside of ``whole``.
    """

    follows = False

    linear: Call = staticmethod(F.linear)
    conv1d: Call = staticmethod(F.conv1d)
    conv2d: Call = staticmethod(F.conv2d)
    conv3d: Call = staticmethod(F.conv3d)
    layer_norm: Call = staticmethod(torch.layer_norm)
    batch_norm: Call = staticmethod(torch.batch_norm)

    def whole(self, module: nn.Module) -> Call:
        """Return what to call instead of a module of which nothing is known."""
        return module


TORCH = Operations()
