"""What the guide shows as printed is what is printed."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "first-pipeline.md"

pytestmark = pytest.mark.people


def shown_after_first_block() -> tuple[str, str]:
    """Return the first python block of the guide and the indented lines that follow it."""
    text = GUIDE.read_text()
    _, code, rest = text.split("```", 2)
    lines = rest.strip("\n").split("\n")
    shown = [line for line in lines[: lines.index("")] if line.startswith("    ")]
    return code.removeprefix("python\n"), dedent("\n".join(shown))


def test_the_plan_in_the_guide_is_the_one_that_is_printed() -> None:
    code, shown = shown_after_first_block()
    out = io.StringIO()
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(GUIDE), "exec"), namespace)
    assert out.getvalue().rstrip("\n") == shown
