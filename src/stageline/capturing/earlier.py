"""What was there before a recording began, told apart from what it made."""

from __future__ import annotations

import gc
from typing import Any


class Earlier:
    """Knows everything that existed when it was made.

    A process that has imported torch holds half a million objects, and a list of them takes a tenth
    of a second. So the collector sets them aside (``gc.freeze``), and what it lists from then on is
    new. Where somebody else has set objects aside already, ours could not be given back without
    theirs; there they are listed and held.

    Example:
        >>> before, earlier = [1], Earlier()
        >>> after = [1]
        >>> earlier.holds(before), earlier.holds(after)
        (True, False)
        >>> earlier.forget()
    """

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}  # held, so that no id passes to something new
        self._sets_aside = gc.get_freeze_count() == 0
        if self._sets_aside:
            gc.freeze()
        else:
            self._held = {id(value): value for value in gc.get_objects()}

    def holds(self, value: Any) -> bool:
        """Whether a value was there before; what no collector tracks counts as new."""
        if id(value) in self._held:
            return True
        if not gc.is_tracked(value) or any(other is value for other in gc.get_objects()):
            return False
        self._held[id(value)] = value
        return True

    def forget(self) -> None:
        """Let go of everything, and give back to the collector what was set aside."""
        self._held = {}
        if self._sets_aside:
            self._sets_aside = False
            gc.unfreeze()
