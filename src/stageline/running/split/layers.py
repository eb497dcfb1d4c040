"""A stage whose layers are known: its weights wait for W, and no function mode looks on.

To be asked about every operation takes longer than most small operations. Of torch's own layers one
knows what they do to their weights, so that they are called directly (``capturing.direct``), with
operations that build bridges and holds. All other code is followed as ever.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stageline.capturing.direct.calls import Call, DirectCall
from stageline.capturing.direct.operations import Operations
from stageline.running.split.deferred import Deferred
from stageline.running.split.mode import Splitting


class _InHalves(Operations):
    """Operations that build bridges and holds.

    Args:
        splitting: What knows how.
    """

    follows = True

    def __init__(self, splitting: Splitting) -> None:
        self._splitting = splitting
        self.linear = splitting.linear
        self.conv1d = partial(self._followed, F.conv1d)
        self.conv2d = partial(self._followed, F.conv2d)
        self.conv3d = partial(self._followed, F.conv3d)
        self.layer_norm = partial(self._followed, torch.layer_norm)
        self.batch_norm = partial(self._followed, torch.batch_norm)

    def _followed(self, function: Call, *args: Any) -> Any:
        return self._splitting.follow(function, args, {})

    def whole(self, module: nn.Module) -> Call:
        return partial(self._entered, module)

    def _entered(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._splitting as splitting:
            made = module(*args, **kwargs)
        return splitting.held(made)


class KnownLayers:
    """A stage that may be one whose layers are known.

    Attributes:
        splitting: What builds its graphs, one after the other.
        call: What to call instead of it; where something in it is not known, it is followed there.

    Args:
        module: The stage.
    """

    def __init__(self, module: nn.Module) -> None:
        self.splitting = Splitting({}, Deferred())
        self.call: Call = module
        self._direct = DirectCall(module, _InHalves(self.splitting))

    def look(self) -> KnownLayers | None:
        """Look at the stage, once before each batch; return None if it is no such stage."""
        self.call = self._direct.now()
        return self if self._direct.is_known else None
