"""How the values of one recording go in and out of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stageline.capturing.direct.calls import Call, DirectCall
from stageline.capturing.direct.entrances import Entrance
from stageline.capturing.regions import end_region
from stageline.capturing.stage import Parts, StageModule
from stageline.capturing.values import flatten, unflatten

if TYPE_CHECKING:
    from stageline.capturing.staged import Variant


class Wiring:
    """How the values of one recording go in and out of one stage."""

    def __init__(
        self, variant: Variant, index: int, module: StageModule, is_plain: bool, is_last: bool
    ) -> None:
        self.code = variant.codes[index]
        self.recording = variant.recording
        self.module = module
        self._setup = (variant, index, is_plain, is_last)
        self.name = variant.name
        self._is_plain = is_plain
        self._is_last = is_last
        self._spec = variant.recording.output_spec
        before = variant.codes[index - 1].carries if index else ()
        places = {node: index for index, node in enumerate(before)}
        inputs = {node: index for index, node in variant.recording.inputs.items()}
        # Of stage 0 the arguments are what others get from the stage before.
        self._uses = [
            (True, places[value]) if value in places else (False, inputs[value])
            for value in self.code.uses
        ]
        self._changes = [places[value] for value in self.code.changes if value in places]
        made = {value: index for index, value in enumerate(self.code.makes)}
        self._carries: list[tuple[int, int]] = []
        for value in self.code.carries:
            if value in made:
                self._carries.append((0, made[value]))
            elif value in places:
                self._carries.append((1, places[value]))
            else:
                self._carries.append((2, inputs[value]))
        # By far the most common stage takes one value and makes one, which is all that leaves it.
        sources = [*self._uses, *((False, place) for place in self.code.inputs)]
        is_simple = not self._changes and not self.code.has_regions
        self._only = sources[0] if is_simple and len(sources) == 1 else None
        self._makes_all = len(self.code.makes) == 1 and self._carries == [(0, 0)]
        self._returns_one = variant.recording.output_spec == flatten(0)[1]
        self.direct = DirectCall(module)

    @property
    def entrance(self) -> Entrance | None:
        """The layer that meets all of what the stage before has sent, if that is one value."""
        is_sent = self._only is not None and self._only[0]
        is_carried = any(source == 1 for source, _ in self._carries)
        return self.direct.entrance if is_sent and not is_carried else None

    def on(self, parts: Parts) -> Wiring:
        """Return the same for a copy of the stage."""
        variant, index, is_plain, is_last = self._setup
        return Wiring(variant, index, self.module.on(parts), is_plain, is_last)

    def run(self, call: Call, values: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Run the stage.

        Args:
            call: The module of the stage, or what is called in its place.
            values: What the stage before returned.
            leaves: The arguments of the model.
        """
        if self._only is not None:
            sent, place = self._only
            result = call(values[place] if sent else leaves[place])
        else:
            values, result = self._run(call, values, leaves)
        if self._is_last:
            return result[0] if self._returns_one else unflatten(list(result), self._spec)
        if self._makes_all:
            is_bare = self._is_plain and isinstance(result, Tensor)
            return result if is_bare else (self.name, result)
        results = (result,) if len(self.code.makes) == 1 else result
        sources = (results, values, leaves)
        carried = [sources[source][i] for source, i in self._carries]
        if self._is_plain and len(carried) == 1 and isinstance(carried[0], Tensor):
            return carried[0]
        return (self.name, *carried)

    def _run(
        self, call: Call, values: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[Sequence[Any], Any]:
        """Return the values that came in, those that change as copies, and what the code makes."""
        if self._changes:
            # Changed in place here: the stage before may have kept it for its backward.
            values = [v.clone() if i in self._changes else v for i, v in enumerate(values)]
        used = [values[i] if sent else leaves[i] for sent, i in self._uses]
        used += [leaves[i] for i in self.code.inputs]
        if not self.code.has_regions:
            return values, call(*used)
        try:
            return values, call(*used)
        finally:
            end_region()
