"""A model on meta becomes real, stage by stage: a rank makes only what its own stages hold.

Every module is initialised by its own ``reset_parameters`` (or by the ``_init_weights`` of a
transformers model), with random numbers that depend on the seed of the process and the module's
name alone. So a tied weight begins equal on all its holders, and a model begins the same however
it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

InitStage = Callable[[nn.Module, int], Any]


def is_abstract(modules: Iterable[nn.Module]) -> bool:
    """Whether some tensor of these modules is on meta."""
    return any(t.is_meta for module in modules for t in (*module.parameters(), *module.buffers()))


def materialise(
    model: nn.Module,
    stages: Mapping[int, nn.Module],
    others: Iterable[nn.Module],
    device_of: Callable[[int], torch.device],
    init_stage: InitStage | None,
) -> list[str]:
    """Make all tensors of some stages real, and return what nobody has initialised.

    Args:
        model: The whole model; wherever it holds one of these tensors, it gets the real one.
        stages: The stages of this process.
        others: The stages of other processes, which may hold the same tensors.
        device_of: Where a stage lives.
        init_stage: What initialises a stage, instead of the modules themselves.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for index, stage in stages.items():
        for tensor in (*stage.parameters(), *stage.buffers()):
            if tensor.is_meta and id(tensor) not in made:
                made[id(tensor)] = (tensor, _unset(tensor, device_of(index)))
    _exchange((model, *stages.values(), *others), made)
    new = {id(tensor) for _, tensor in made.values()}
    if init_stage is None:
        _initialise(model, new)
    else:
        for index, stage in stages.items():
            with torch.no_grad():
                init_stage(stage, index)
    return _forgotten(stages, new)


def _exchange(roots: Iterable[nn.Module], made: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Put the new tensors wherever the old ones are held."""
    holders = {id(module): module for root in roots for module in root.modules()}
    for holder in holders.values():
        for table in (holder._parameters, holder._buffers):
            for name, old in table.items():
                if old is not None and id(old) in made:
                    table[name] = made[id(old)][1]  # type: ignore[assignment]  # of the same kind


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a real tensor full of what no initialisation would leave there."""
    made = torch.empty_like(tensor, device=device)
    made.fill_(_mark(made.dtype))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _initialise(model: nn.Module, new: set[int]) -> None:
    """Let every module that holds new tensors set them; the first holder of a tied one last."""
    of_library = getattr(model, "_init_weights", None)
    seed = torch.initial_seed()
    for name, module in reversed(list(model.named_modules())):
        own = [*module._parameters.values(), *module._buffers.values()]
        if not any(id(tensor) in new for tensor in own if tensor is not None):
            continue
        reset = getattr(module, "reset_parameters", None)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed_of(seed, name))
            if callable(of_library):
                of_library(module)
            elif callable(reset):
                reset()


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _forgotten(stages: Mapping[int, nn.Module], new: set[int]) -> list[str]:
    """Return a fault for every new tensor that nobody has set."""
    return [
        f"{name} was made real on this rank, but nobody initialised it: give its module a "
        "reset_parameters(), or pass init_stage=..., which is called with a stage and its index"
        for stage in stages.values()
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
        if id(tensor) in new and tensor.numel() and tensor.dtype is not torch.bool
        if _is_unset(tensor)
    ]


def _is_unset(tensor: Tensor) -> bool:
    mark = _mark(tensor.dtype)
    untouched = torch.isnan(tensor) if mark != mark else tensor == mark
    return bool(untouched.all())
