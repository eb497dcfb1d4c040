"""The first look at a model: a plain run, of which a capture makes twofold use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from stageline.capturing.inputs import Arguments
from stageline.capturing.survey import Survey, survey_with_result


@dataclass(frozen=True)
class Look:
    """A plain run of the model.

    Attributes:
        arguments: What it was called with.
        seen: Which modules were called.
        result: What it gave, if a recording may be compared with that.
    """

    arguments: Arguments
    seen: Survey
    result: tuple[Any] | None

    def result_for(self, arguments: Arguments) -> tuple[Any] | None:
        """Return what the model gave for some arguments, if that is known."""
        return self.result if arguments is self.arguments else None


def look_at(model: nn.Module, arguments: Arguments) -> Look:
    """Run a model with one row more than its example has, if it can.

    That tells its layers as well as the example would, and is what the recording must give there.
    One row is an example of its own: code may treat it differently.
    """
    other = arguments.with_one_row_more() if (arguments.rows or 0) > 1 else None
    if other is not None:
        try:
            return Look(other, *survey_with_result(model, *other.copied().unpacked()))
        except Exception:
            pass  # it takes no other size, or is wrong altogether: then the example raises too
    return Look(arguments, *survey_with_result(model, *arguments.copied().unpacked()))
