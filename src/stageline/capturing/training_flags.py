"""The training flags of opened modules, which are in no stage although their code is.

    model           training = True ◀─── stage.eval() of a stage whose code reads it
      block 0       in stage 0      ◀─── stage 0 .eval(), as in any module
      block 1       in stage 1

There is one flag for the whole model, as in the plain model, and it decides which recording all
stages follow. So two stages that read one flag must be in one mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from stageline.errors import CaptureError


class TrainingFlags:
    """The flags of the opened modules of one model, and what its stages were put into.

    Shared by all copies of a stage, and never copied.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> flags = TrainingFlags({"": model}, num_stages=2)
        >>> flags.note_reads(1, {"": model})
        >>> flags.train(0, False), model.training  # stage 1 alone decides by it
        (None, True)
        >>> flags.train(1, False), model.training
        (None, False)

    Args:
        modules: The opened modules, by name.
        num_stages: How many stages the model has.
    """

    def __init__(self, modules: Mapping[str, nn.Module], num_stages: int) -> None:
        self._modules = dict(modules)
        self._here: Collection[int] = range(num_stages)
        self._readers: dict[str, set[int]] = {path: set() for path in modules}
        self._known = self._now()
        self._wanted: dict[str, dict[int, bool]] = {path: {} for path in modules}

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The opened modules."""
        return self._modules.values()

    def _now(self) -> dict[str, bool]:
        return {path: module.training for path, module in self._modules.items()}

    def hold(self, stages: Iterable[int]) -> None:
        """Say which stages this process holds; the others are put into modes elsewhere."""
        self._here = frozenset(stages)

    def note_reads(self, stage: int, modules: Mapping[str, nn.Module]) -> None:
        """Take in that the code of a stage reads the flags of some modules."""
        for path, module in modules.items():
            if path not in self._modules:  # opened only in a later recording
                self._modules[path], self._known[path] = module, module.training
                self._readers[path], self._wanted[path] = set(), {}
            self._readers[path].add(stage)

    def train(self, stage: int, mode: bool) -> None:
        """Follow one stage: set the flags that its code reads, and those that none here reads."""
        self._forget_what_the_user_changed()
        for path, module in self._modules.items():
            wanted, readers = self._wanted[path], self._readers[path].intersection(self._here)
            if not readers or stage in readers:
                if module.training is not mode:
                    for other in self._here:
                        wanted.setdefault(other, module.training)
                module.training = mode
            wanted[stage] = mode
        self._known = self._now()

    def train_all(self, mode: bool) -> None:
        """Set all flags, whatever single stages were put into."""
        for path, module in self._modules.items():
            module.training = mode
            self._wanted[path].clear()
        self._known = self._now()

    def _forget_what_the_user_changed(self) -> None:
        """A flag that was set on the module itself stands, as in the plain model."""
        for path, flag in self._now().items():
            if flag is not self._known[path]:
                self._wanted[path].clear()
                self._known[path] = flag

    def check(self) -> None:
        """Raise if stages of this process want one flag to be on and off.

        Raises:
            CaptureError: They were put into different modes, and both read it.
        """
        self._forget_what_the_user_changed()
        for path, readers in self._readers.items():
            flag, wanted = self._known[path], self._wanted[path]
            against = [stage for stage in sorted(readers) if wanted.get(stage, flag) is not flag]
            if against:
                name = f"{path} " if path else ""
                raise CaptureError(
                    f"stage {against[0]} was put into {_named(not flag)} mode, but the training "
                    f"flag of {name}{type(self._modules[path]).__name__}, which its code reads, is "
                    f"that of {_named(flag)} mode, as another stage wants it: put both stages into "
                    "one mode, or keep the code that reads the flag inside a module of one stage"
                )

    def __deepcopy__(self, memo: Any) -> TrainingFlags:
        return self


def _named(mode: bool) -> str:
    return "training" if mode else "evaluation"
