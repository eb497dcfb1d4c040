"""Words for messages."""

from __future__ import annotations

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
