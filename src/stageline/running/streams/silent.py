"""Calls of drawing functions whose arguments say that they draw nothing: they cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def is_silent(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call certainly draws nothing.

    Example:
        >>> x = torch.ones(1, 1, 2, 2)
        >>> is_silent(F.scaled_dot_product_attention, (x, x, x), {})
        True
        >>> is_silent(F.scaled_dot_product_attention, (x, x, x, None, 0.1), {})
        False
    """
    question = _QUESTIONS.get(func)
    return question is not None and question(args, kwargs)


def _given(args: Any, kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _attention(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(_given(args, kwargs, 4, "dropout_p", 0.0) == 0.0)


def _multi_head(args: Any, kwargs: dict[str, Any]) -> bool:
    p = _given(args, kwargs, 10, "dropout_p", 0.0)
    return p == 0.0 or not _given(args, kwargs, 13, "training", True)


def _recurrent(args: Any, kwargs: dict[str, Any]) -> bool:
    """Arguments end alike: has_biases, num_layers, dropout, train, bidirectional, ..."""
    first = next((i for i, value in enumerate(args) if isinstance(value, bool)), None)
    if kwargs or first is None or len(args) < first + 4:
        return False
    return bool(args[first + 2] == 0.0) or not args[first + 3]


def _not_training(place: int) -> Callable[[Any, dict[str, Any]], bool]:
    return lambda args, kwargs: _given(args, kwargs, place, "training", True) is False


_QUESTIONS: dict[Any, Callable[[Any, dict[str, Any]], bool]] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
    F.rrelu: _not_training(3),
    F.dropout1d: _not_training(2),
    F.dropout2d: _not_training(2),
    F.dropout3d: _not_training(2),
    F.alpha_dropout: _not_training(2),
    F.feature_alpha_dropout: _not_training(2),
}
