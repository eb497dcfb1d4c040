"""Words for messages."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from stageline.wording import a, a_kind


@pytest.mark.parametrize(
    "spoken",
    [
        "an int",
        "an OrderedDict",
        "an Embedding",
        "an Upsample",
        "a Linear",
        "a ReLU",
        "a UNet",
        "a UniformNoise",
        "a UserDict",
        "an LSTM",
        "an MLP",
        "a GRU",
        "an RMSNorm",
        "a tuple",
        "a _Hidden",
    ],
)
def test_the_article_is_that_of_the_spoken_word(spoken: str) -> None:
    assert a(spoken.split()[1]) == spoken


def test_a_value_is_called_by_its_class() -> None:
    assert a_kind(3) == "an int"
    assert a_kind(OrderedDict()) == "an OrderedDict"
