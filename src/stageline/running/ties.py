"""Tied parameters: one tensor that several stages use, and the one gradient it gets.

    threads       rank 0: weight     rank 2: shadow, over the same memory, with a .grad of its own
    processes     rank 0: weight     rank 2: the same weight in the model of that process

    step          every copy begins without a gradient and collects that of this step alone;
                  these are added, last stage first, and the sum goes to what was there before

Adding up ``.grad`` itself would count twice what an earlier step accumulated. Two threads never
accumulate into one ``.grad``, so the order of additions is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stageline.errors import ConfigError, PipeError
from stageline.partitioning.sharing import Holder, Shared, keeps_statistics
from stageline.running.replacing import Replacement
from stageline.running.runner import Runner
from stageline.running.tied_gradients import Tied, TiedGradients, onto
from stageline.torch_private import has_gradient_hooks
from stageline.wording import a_kind

_New = dict[int, dict[int, tuple[Tensor, Tensor]]]  # by rank and identity: the old, the new tensor


class Ties:
    """What the stages of this process share with each other and with those of other processes.

    Args:
        shared: What several stages hold.
        placement: The rank of each stage.
        devices: The device of each rank.
        ranks_here: The ranks that live in this process.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        *,
        placement: Sequence[int],
        devices: Sequence[torch.device],
        ranks_here: Sequence[int],
    ) -> None:
        self._placement = placement
        self._devices = devices
        self._ranks_here = tuple(ranks_here)
        self._copied: list[_Copied] = []
        self._watched: list[_Watched] = []
        self._tied: list[Tied] = []
        self.shadows: list[Tensor] = []
        # Who may use which tensor: (tensor, name, first stage, stages that may).
        self.users: list[tuple[nn.Parameter, str, int, frozenset[int]]] = []
        new: _New = {rank: {} for rank in ranks_here}
        for one in shared:
            self._add(one, new)
        self._gradients = TiedGradients(self._tied, self._ranks_here)
        self._replacements = {rank: Replacement(tensors) for rank, tensors in new.items()}

    def _add(self, shared: Shared, new: _New) -> None:
        here = [h for h in shared.holders if self._placement[h.stage] in self._ranks_here]
        if not here:  # a process does not keep alive what it does not run
            return
        copies = self._copies(here)
        own = here[0].tensor
        self.shadows += [tensor for tensor in copies.values() if tensor is not own]
        for rank, tensor in copies.items():
            # Two Parameters over one memory become one, also for a rank that has both.
            if shared.is_parameter or tensor is not own:
                olds = (h.tensor for h in shared.holders if h.tensor is not tensor)
                new[rank].update((id(old), (old, tensor)) for old in olds)
        if not shared.is_parameter:
            self._watched += [_Watched(h.name, h.module, h.key) for h in here]
            return
        self._add_users(shared, copies)
        last_stages = {self._placement[stage]: stage for stage in shared.stages}
        if len(last_stages) > 1:
            ranks = sorted(last_stages, key=lambda rank: -last_stages[rank])
            root = self._placement[shared.stages[0]]
            parameters = {r: p for r, p in copies.items() if isinstance(p, nn.Parameter)}
            self._tied.append(Tied(shared.name, tuple(ranks), root, parameters))

    def _copies(self, holders: Sequence[Holder]) -> dict[int, Tensor]:
        """Return what each rank uses: the first its own tensor, the others a copy of that one."""
        own, home = holders[0].tensor, self._placement[holders[0].stage]
        copies = {home: own}
        for holder in holders:
            rank = self._placement[holder.stage]
            if rank not in copies:
                copies[rank] = self._copy(own, home, rank)
        return copies

    def _copy(self, own: Tensor, home: int, rank: int) -> Tensor:
        if isinstance(own, nn.Parameter):
            # detach() shares the version counter: autograd then notices in every copy that an
            # optimizer has changed the weight between a forward and its backward.
            shadow = nn.Parameter(own.detach(), requires_grad=own.requires_grad)
            vars(shadow).update(vars(own))
            return shadow
        device = self._devices[rank]
        return own if device == self._devices[home] else own.to(device)

    def _add_users(self, shared: Shared, copies: Mapping[int, Tensor]) -> None:
        everyone = frozenset(shared.stages)
        allowed: dict[int, frozenset[int]] = {}
        for number, (rank, tensor) in enumerate(copies.items()):
            mine = frozenset(s for s in shared.stages if self._placement[s] == rank)
            allowed[id(tensor)] = mine if number else everyone
        tensors = {id(t): t for t in (*(h.tensor for h in shared.holders), *copies.values())}
        self.users += [
            (tensor, shared.name, shared.stages[0], allowed.get(number, frozenset()))
            for number, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter)
        ]

    def localise(self, rank: int, module: nn.Module, *, what: str = "sl.Pipeline") -> nn.Module:
        """Return a stage's module as a rank uses it: over that rank's copies of tied tensors.

        A module that holds none of them is returned as it is.

        Raises:
            ConfigError: It holds one, and it cannot be copied.
        """
        try:
            made = self._replacements[rank].apply(module)
        except ValueError as cause:
            names = ", ".join(tied.name for tied in self._tied)
            raise ConfigError(
                what,
                [
                    f"a stage of rank {rank} shares a tensor with another rank (tied: {names}) and "
                    f"needs a copy of its {type(module).__name__}, but {cause}: put all that use "
                    "the tensor into one stage"
                ],
            ) from cause
        if made is not module:
            self._follow(module, made)
        return made

    def _follow(self, module: nn.Module, made: nn.Module) -> None:
        """Remember which modules were copied, to keep them and their buffers like the originals."""
        known = {id(copied.made) for copied in self._copied}
        inner = dict(made.named_modules(remove_duplicate=False))
        for name, given in module.named_modules(remove_duplicate=False):
            if inner[name] is given or id(inner[name]) in known:
                continue
            known.add(id(inner[name]))
            self._copied.append(_Copied(given, inner[name], given.training))
            self._watched += [
                _Watched(watched.name, inner[name], watched.key)
                for watched in tuple(self._watched)
                if watched.module is given
            ]

    @property
    def has_parameters(self) -> bool:
        """Whether there are parameters of several ranks."""
        return bool(self._tied)

    @property
    def has_buffers(self) -> bool:
        """Whether there are buffers of several stages."""
        return bool(self._watched)

    def refresh(self) -> None:
        """Let every copy follow the user's own parameter, and every copied module its original."""
        for tied in self._tied:
            own = tied.own
            if has_gradient_hooks(own):
                raise PipeError(
                    f"{tied.name} is used by stages of several ranks, and a hook on it would see a "
                    "part of its gradient: remove the hook, or put these stages on one rank"
                )
            for rank, shadow in tied.shadows.items():
                # An optimizer works in place, but `p.data = ...` does not.
                shadow.data = own.data.to(self._devices[rank])
                shadow.requires_grad_(own.requires_grad)
        for copied in self._copied:
            if copied.given.training != copied.training:
                copied.training = copied.made.training = copied.given.training

    @contextmanager
    def buffers_watched(self) -> Iterator[None]:
        """Raise if a buffer of several stages is changed while they run."""
        for watched in self._watched:
            # torch's own kernel changes the statistics without counting it as a change.
            if keeps_statistics(watched.module):
                raise PipeError(
                    f"{watched.name}: {a_kind(watched.module)} of several stages is in "
                    "training mode, and its statistics would depend on who comes first: call "
                    "eval() on it after pipe.train(), or put these stages together"
                )
        before = [watched.look() for watched in self._watched]
        yield
        for watched, (tensor, version) in zip(self._watched, before, strict=True):
            now, now_version = watched.look()
            if now is not tensor or now_version != version:
                raise PipeError(
                    f"{watched.name} is a buffer of several stages, and one of them changed it: in "
                    "which order they do is not what it is in the plain model. Put these stages "
                    "together, or give each a buffer of its own"
                )

    @contextmanager
    def summed(self, runner: Runner) -> Iterator[None]:
        """Give every tied parameter the sum of what its copies collect; nothing if that fails."""
        before = [tied.own.grad for tied in self._tied]
        self._forget()
        try:
            yield
            totals = self._gradients.sums(runner) if self._tied else []
        except BaseException:
            self._restore(before)
            raise
        if any(old is not None for old in before):
            with torch.no_grad():
                totals = [onto(old, total) for old, total in zip(before, totals, strict=True)]
        self._restore(totals)

    def _forget(self) -> None:
        for tied in self._tied:
            for parameter in tied.copies.values():
                parameter.grad = None

    def _restore(self, grads: Sequence[Tensor | None]) -> None:
        self._forget()
        for tied, grad in zip(self._tied, grads, strict=True):
            tied.own.grad = grad


@dataclass
class _Copied:
    """A module and its copy; ``training`` is what the module said when last looked at."""

    given: nn.Module
    made: nn.Module
    training: bool


@dataclass(frozen=True)
class _Watched:
    """A buffer that must not change."""

    name: str
    module: nn.Module
    key: str

    def look(self) -> tuple[Tensor | None, int]:
        tensor = getattr(self.module, self.key, None)
        if not isinstance(tensor, Tensor) or tensor.is_inference():
            return tensor, 0
        return tensor, tensor._version
