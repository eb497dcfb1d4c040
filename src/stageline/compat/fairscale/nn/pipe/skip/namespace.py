"""Namespaces: two skip connections of one model may then have the same name."""

from __future__ import annotations

import uuid
from functools import total_ordering


@total_ordering
class Namespace:
    """Keeps skip tensors apart that have the same name; see ``Skippable.isolate``.

    Example:
        >>> Namespace() == Namespace()
        False
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id < other.id
