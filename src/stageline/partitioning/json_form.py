"""What is saved as JSON says what it is: a format, a version, and a line for each entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonForm:
    """One kind of thing that can be saved.

    Example:
        >>> form = JsonForm("plan")
        >>> print(form.text({"cuts": [2, 5]}))
        {
          "format": "stageline plan",
          "version": 1,
          "cuts": [2, 5]
        }
        >>> form.entries("{}")
        ({}, ['this JSON holds no plan: give it what plan.to_json() returned'])

    Attributes:
        what: What it is called.
        version: Of its entries; others are refused.
    """

    what: str
    version: int = 1

    @property
    def _format(self) -> str:
        return f"stageline {self.what}"

    def text(self, entries: Mapping[str, Any]) -> str:
        """Return entries as JSON."""
        marked = {"format": self._format, "version": self.version, **entries}
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in marked.items())
        return "{\n" + ",\n".join(lines) + "\n}"

    def entries(self, text: object) -> tuple[dict[str, Any], list[str]]:
        """Return the entries that a text holds, or what is wrong with the text."""
        if not isinstance(text, str):
            return {}, [
                f"wanted the text that {self.what}.to_json() returned, got {type(text).__name__}"
            ]
        way_out = f"give it what {self.what}.to_json() returned"
        try:
            found = json.loads(text)
        except json.JSONDecodeError as cause:
            return {}, [f"this is no JSON: {cause}: {way_out}"]
        if not isinstance(found, dict) or found.get("format") != self._format:
            return {}, [f"this JSON holds no {self.what}: {way_out}"]
        if found.get("version") != self.version:
            came = f"this {self.what} text has version {found.get('version')!r}"
            return {}, [f"{came}, wanted {self.version}: make it anew"]
        return found, []
