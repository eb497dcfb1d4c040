"""The random numbers of a process: kept while a model is run on trial."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch


def kept_randomness() -> Callable[[], None]:
    """Return what puts the generators of torch, Python and numpy back to where they are now.

    Example:
        >>> put_back = kept_randomness()
        >>> first = torch.rand(1)
        >>> put_back()
        >>> torch.equal(torch.rand(1), first)
        True
    """
    on_accelerator = _kept_on_accelerator()
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        on_accelerator()

    return put_back


def _kept_on_accelerator() -> Callable[[], None]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return lambda: None
    module = torch.get_device_module(accelerator)
    # Asking an accelerator that nobody uses yet would start it, and take memory there.
    if not getattr(module, "is_initialized", lambda: True)():
        return lambda: None
    if hasattr(module, "get_rng_state_all"):
        states = module.get_rng_state_all()
        return lambda: module.set_rng_state_all(states)
    state = module.get_rng_state()
    return lambda: module.set_rng_state(state)
