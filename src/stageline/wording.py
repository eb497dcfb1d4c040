"""Words and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SPELLED_WITH_VOWEL = "AEFHILMNORSX"  # an LSTM, an MLP; but a GRU


def a(word: str) -> str:
    """Return a word with its article, as it is spoken.

    Example:
        >>> [a(word) for word in ("int", "Linear", "LSTM", "UNet")]
        ['an int', 'a Linear', 'an LSTM', 'a UNet']
    """
    if word[:2].isupper():
        vowel = word[0] in _SPELLED_WITH_VOWEL
    elif word.lower().startswith(("uni", "use")):  # spoken with the y of you
        vowel = False
    else:
        vowel = word[:1].lower() in tuple("aeiou")
    return f"{'an' if vowel else 'a'} {word}"


def a_kind(value: object) -> str:
    """Return what a value is, by the name of its class.

    Example:
        >>> a_kind(3)
        'an int'
    """
    return a(type(value).__name__)


def from_to(names: Sequence[str]) -> str:
    """Return the first and the last of some names.

    Example:
        >>> from_to(["a", "b", "c"]), from_to(["a"])
        ('a .. c', 'a')
    """
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def shares(counts: Sequence[int | None]) -> list[str]:
    """Return each as a share of all; nothing if one of them is not known.

    Example:
        >>> shares([1, 3])
        ['25 %', '75 %']
    """
    known = [count for count in counts if count is not None]
    total = sum(known)
    if len(known) < len(counts) or not total:
        return [""] * len(counts)
    return [f"{100 * count / total:.0f} %" for count in known]


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with as many digits as matter.

    Example:
        >>> milliseconds(1.23456), milliseconds(0.0123456), milliseconds(0.000123456)
        ('1234.6', '12.35', '0.1235')
    """
    value = 1e3 * seconds
    return f"{value:.1f}" if value >= 100 else f"{value:.4g}"


def aligned(columns: Mapping[str, Sequence[str]], *, left: Sequence[str] = ()) -> str:
    """Return columns, by their titles, as a table.

    Example:
        >>> print(aligned({"stage": ["0", "1"], "name": ["a", "b"]}, left=["name"]))
        stage  name
            0  a
            1  b
    """
    widths = {title: max(len(cell) for cell in (title, *cells)) for title, cells in columns.items()}
    rows = zip(*([title, *cells] for title, cells in columns.items()), strict=True)
    lines = (
        "  ".join(
            cell.ljust(width) if title in left else cell.rjust(width)
            for cell, (title, width) in zip(row, widths.items(), strict=True)
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)
