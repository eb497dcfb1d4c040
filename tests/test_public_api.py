"""What `stageline` exports, and how it is called, is what docs/api.md says.

A change of the public API shows as a change of that page. To write the page anew: `make api`, or
`python -m tests.test_public_api --write`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stageline

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- api: begin, written by make api -->", "<!-- api: end -->"
HINT = "If the change is meant, write the page anew: make api"
EMPTY_PAGE = f"""\
# Public API

Every name that `import stageline as sl` offers, with its signature. A test compares this page with
the package, so it cannot age.

{BEGIN}
{END}
"""

LINE = 96
USED_BY_SYNTAX = {"__call__", "__enter__", "__getitem__", "__iter__", "__len__"}
STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}


def snapshot(module: ModuleType) -> str:
    """Return one entry per name of `__all__`, in alphabetical order."""
    entries = (entry(name, getattr(module, name)) for name in sorted(module.__all__))
    return "\n\n".join("\n".join(lines) for lines in entries)


def entry(name: str, value: object) -> Iterator[str]:
    """Yield the lines that describe one public name."""
    if inspect.ismodule(value):
        yield f"module {name}"
        for member in sorted(getattr(value, "__all__", ())):
            yield from indented(entry(member, getattr(value, member)))
    elif inspect.isclass(value):
        yield from class_lines(name, value)
    elif inspect.isroutine(value):
        yield from wrapped(f"def {name}", signature(value))
    else:
        yield f"{name}: {type(value).__name__}"


def class_lines(name: str, cls: type) -> Iterator[str]:
    """Yield `class Name(Bases):`, how it is made, and its public members."""
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    head = f"class {name}({bases}):" if bases else f"class {name}:"
    body = [*constructor_lines(cls)]
    for member in sorted(public_members(cls)):
        body += member_lines(member, inspect.getattr_static(cls, member))
    yield head if body else f"{head} ..."
    yield from indented(iter(body))


def constructor_lines(cls: type) -> Iterator[str]:
    """Yield how an object is made, where this package says so."""
    if issubclass(cls, enum.Enum):
        yield f"members: {', '.join(cls.__members__)}"
    elif any("__init__" in vars(base) for base in our_classes(cls)):
        yield from wrapped("def __init__", signature(cls))


def our_classes(cls: type) -> list[type]:
    """Return the class and those of its bases that belong to this package."""
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == "stageline"]


def public_members(cls: type) -> set[str]:
    """Return the public names that the class has from this package; fields are in `__init__`."""
    names = {name for base in our_classes(cls) for name in vars(base)}
    fields = set(getattr(cls, "__dataclass_fields__", ())) | set(getattr(cls, "__members__", ()))
    public = {name for name in names if not name.startswith("_")}
    return (public | names & USED_BY_SYNTAX) - fields


def member_lines(name: str, value: object) -> Iterator[str]:
    """Yield the lines of one member of a class."""
    if isinstance(value, classmethod | staticmethod):
        yield f"@{type(value).__name__}"
        yield from wrapped(f"def {name}", signature(value.__func__))
    elif isinstance(value, property | functools.cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        yield f"{name}: {annotation(signature(getter).return_annotation)}  # property"
    elif inspect.isroutine(value) and callable(value):
        yield from wrapped(f"def {name}", signature(value))
    else:
        yield f"{name}: {type(value).__name__}"


def signature(value: object) -> inspect.Signature:
    assert callable(value)
    return inspect.signature(value)


def wrapped(start: str, found: inspect.Signature) -> Iterator[str]:
    """Yield the signature on one line, or with a parameter per line where that is too long."""
    words = parameters(found)
    result = found.return_annotation
    end = ")" if result is inspect.Signature.empty else f") -> {annotation(result)}"
    line = f"{start}({', '.join(words)}{end}"
    if len(line) <= LINE:
        yield line
    else:
        yield f"{start}("
        yield from (f"    {word}," for word in words)
        yield end


def parameters(found: inspect.Signature) -> list[str]:
    """Return the parameters as they are written, with the bare `/` and `*` between them."""
    words: list[str] = []
    last: inspect.Parameter | None = None
    for parameter in found.parameters.values():
        before = last.kind if last else None
        if before is parameter.POSITIONAL_ONLY and parameter.kind is not before:
            words.append("/")
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if keyword_only and before not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            words.append("*")
        words.append(parameter_text(parameter))
        last = parameter
    if last and last.kind is last.POSITIONAL_ONLY:
        words.append("/")
    return words


def parameter_text(parameter: inspect.Parameter) -> str:
    text = STARS.get(parameter.kind.name, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        equals = "=" if parameter.annotation is parameter.empty else " = "
        text += equals + default_text(parameter.default)
    return text


def annotation(value: object) -> str:
    """Return an annotation as it is written, whether it was postponed or not."""
    text = value if isinstance(value, str) else str(inspect.formatannotation(value))
    return re.sub(r"\b(?:stageline|torch|collections|typing)(?:\.[a-z_]\w*)*\.(?=[A-Z])", "", text)


def default_text(value: object) -> str:
    """Return a default without the addresses that `repr` may show."""
    if isinstance(value, enum.Enum):
        return str(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__name__
    text = repr(value)
    return "..." if " at 0x" in text else text


def indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def fenced(text: str) -> str:
    return f"{BEGIN}\n```python\n{text}\n```\n{END}"


def written() -> str:
    """Return the snapshot that the page holds."""
    if not PAGE.is_file():
        raise AssertionError(f"docs/api.md does not exist. {HINT}")
    found = re.search(re.escape(BEGIN) + r"\n```python\n(.*?)\n```\n", PAGE.read_text(), re.DOTALL)
    if found is None:
        raise AssertionError(f"docs/api.md holds no block after {BEGIN!r}. {HINT}")
    return found[1]


def write() -> None:
    """Replace the block of the page and leave the text around it alone."""
    page = PAGE.read_text() if PAGE.is_file() else EMPTY_PAGE
    if BEGIN not in page or END not in page:
        page += f"\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(before + fenced(snapshot(stageline)) + after)


def test_public_api_is_the_one_in_the_docs() -> None:
    changes = difflib.unified_diff(
        written().splitlines(),
        snapshot(stageline).splitlines(),
        "docs/api.md",
        "stageline",
        lineterm="",
        n=1,
    )
    difference = "\n".join(changes)
    assert not difference, f"the public API differs from docs/api.md:\n{difference}\n{HINT}"


def test_every_public_name_exists_and_has_a_docstring() -> None:
    values = {name: getattr(stageline, name) for name in stageline.__all__}
    described = {n: v for n, v in values.items() if inspect.isroutine(v) or inspect.isclass(v)}
    assert [name for name, value in described.items() if not value.__doc__] == []
    assert len(set(stageline.__all__)) == len(stageline.__all__)


# The snapshot itself, on a module that shows every kind of name.


class Color(enum.Enum):
    """A stand-in."""

    RED = 1


def paint(
    wall: int, /, *coats: str, color: Color = Color.RED, by: object = len, **rest: bool
) -> None:
    """A stand-in."""


def test_a_snapshot_shows_names_signatures_and_members() -> None:
    room = ModuleType("room")
    room.paint, room.Color, room.LIMIT = paint, Color, 3  # type: ignore[attr-defined]  # a module made by hand
    room.__all__ = ["paint", "Color", "LIMIT"]  # type: ignore[attr-defined]  # the same
    assert snapshot(room) == (
        "class Color(Enum):\n"
        "    members: RED\n"
        "\n"
        "LIMIT: int\n"
        "\n"
        "def paint(\n"
        "    wall: int,\n"
        "    /,\n"
        "    *coats: str,\n"
        "    color: Color = Color.RED,\n"
        "    by: object = len,\n"
        "    **rest: bool,\n"
        ") -> None"
    )


def test_a_missing_page_says_how_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PAGE", tmp_path / "docs" / "api.md")
    with pytest.raises(AssertionError, match="make api"):
        written()
    write()
    assert written() == snapshot(stageline)


def test_writing_leaves_the_text_around_the_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "api.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(sys.modules[__name__], "PAGE", page)
    write()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.test_public_api --write")
    write()
    print(f"wrote {PAGE.relative_to(ROOT)}")
