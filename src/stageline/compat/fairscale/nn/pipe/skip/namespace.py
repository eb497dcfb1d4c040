"""Namespaces: two skip connections of one model may then have the same name."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True, repr=False)
class Namespace:
    """Keeps skip tensors apart that have the same name; see ``Skippable.isolate``.

    Example:
        >>> Namespace() == Namespace()
        False
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"
