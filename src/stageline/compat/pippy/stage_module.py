"""The modules that a Pipe is made of: one for each stage, and one that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from stageline.capturing.stage import TABLES
from stageline.capturing.staged import VariantStage


class PipeStageModule(nn.Module):
    """One stage of a pipe: modules of the model, under their names in it.

    Called, it runs what the model's code does between two split points: given what earlier stages
    have made and the arguments of the model that it uses, it returns what later stages need.
    """

    def __init__(self, stage: VariantStage, text: Callable[[], str]) -> None:
        super().__init__()
        # The same tables, so that moving one to a device moves both.
        vars(self).update({table: vars(stage)[table] for table in TABLES})
        self.training = stage.training
        self.index = stage.index
        self._code, self._follow, self._text = stage.module_of, stage.train, text

    def forward(self, *args: Any) -> Any:
        return self._code()(*args)

    def train(self, mode: bool = True) -> PipeStageModule:
        self.training = mode
        self._follow(mode)
        return self

    def __repr__(self) -> str:
        return self._text()

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "a schedule runs the layers of a stage and never calls the module around them, so that "
            "a hook here would not be called: register it on a layer, stage.submod.get_submodule("
            "name), or use sl.Pipeline(plan=pipe.plan, wrap_stage=...)"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise no_copy("a stage")


class SplitModule(nn.Module):
    """Holds the stages of a pipe."""

    def __init__(self, show: Callable[[], None], text: Callable[[], str]) -> None:
        super().__init__()
        self._show, self._text = show, text

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "To run pipeline locally, invoke the Pipe object directly, not `split_gm`"
        )

    def print_readable(self) -> None:
        self._show()

    def __repr__(self) -> str:
        return self._text()


def no_copy(what: str) -> TypeError:
    return TypeError(
        f"{what} cannot be copied or pickled: copy the model and call pipeline() on the copy, or "
        "save state_dict()"
    )
