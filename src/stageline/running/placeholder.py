"""What an optimizer is given on a rank that has nothing to optimize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Placeholder(nn.Parameter):
    """A parameter without elements, which stands in no stage and is never trained.

    An optimizer refuses an empty list. A stage of activations has no parameter, so its process
    would fail in ``torch.optim.AdamW(pipe.parameters())``, which works on all other ranks.

    It adds nothing to a count of elements, to a norm or to a vector of all parameters. It has two
    dimensions because ``torch.optim.Muon`` takes only such, and the second one has a size because
    some functions of ``torch.nn.init`` divide by the sum of both.

    Example:
        >>> placeholder = Placeholder.on(torch.device("cpu"))
        >>> torch.optim.AdamW([placeholder]).step()
        >>> placeholder.numel(), placeholder.grad
        (0, None)
    """

    @classmethod
    def on(cls, device: torch.device) -> Placeholder:
        """Return a placeholder on the device of a rank."""
        return cls(torch.empty(0, 1, device=device))

    # torch declares one overload for each kind of argument.
    def new(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return a tensor of one element where one without any would do.

        ``torch.optim.LBFGS`` makes a missing gradient by it and then takes the largest entry of
        all gradients, which must not be empty.
        """
        return super().new(1)
