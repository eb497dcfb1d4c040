"""Inputs for the models of the zoo: one description, one maker per kind of model.

    Shape(batch=4, length=16, labels=True, padding="right")  ->  {"input_ids": ..., "labels": ...}

``length`` is the number of tokens, of audio frames or the side of an image, whatever a model
takes; ``scale`` in a maker turns it into the model's own unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 99
PAD = 1
FIRST_WORD = 5  # below are special tokens: start, pad, end, unknown, mask


@dataclass(frozen=True)
class Shape:
    """What an input looks like.

    Attributes:
        batch: Rows.
        length: Tokens of a row; see the module's docstring.
        labels: Whether labels are passed, so that the model computes its loss.
        padding: ``"absent"`` passes no mask, ``"ones"`` one that masks nothing; ``"right"`` and
            ``"left"`` say on which side rows are padded, every row by another amount.
        seed: Of the data; with another seed the amounts of padding differ too.
    """

    batch: int = 4
    length: int = 16
    labels: bool = True
    padding: str = "ones"
    seed: int = 1


Inputs = dict[str, Any]
Maker = Callable[[Shape], Inputs]


def _generator(shape: Shape) -> torch.Generator:
    return torch.Generator().manual_seed(shape.seed)


def _tokens(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (shape.batch, shape.length), generator=generator)


def _mask(shape: Shape, generator: torch.Generator) -> Tensor | None:
    if shape.padding == "absent":
        return None
    rows = torch.ones(shape.batch, shape.length, dtype=torch.long)
    if shape.padding == "ones":
        return rows
    # At least one token of padding, so that one row of a batch of one is padded too.
    amounts = torch.randint(1, shape.length // 2, (shape.batch,), generator=generator)
    columns = torch.arange(shape.length).expand(shape.batch, -1)
    if shape.padding == "left":
        return (columns >= amounts[:, None]).long()
    return (columns < shape.length - amounts[:, None]).long()


def _padded_tokens(shape: Shape) -> tuple[Inputs, torch.Generator]:
    generator = _generator(shape)
    ids, mask = _tokens(shape, generator), _mask(shape, generator)
    if mask is None:
        return {"input_ids": ids}, generator
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}, generator


def language_model(shape: Shape) -> Inputs:
    """Tokens, and the same tokens as labels."""
    inputs, _ = _padded_tokens(shape)
    if shape.labels:
        ids = inputs["input_ids"]
        inputs["labels"] = ids.masked_fill(ids == PAD, -100)
    return inputs


def classifier(shape: Shape) -> Inputs:
    """Tokens, and one of two classes per row."""
    inputs, generator = _padded_tokens(shape)
    if shape.labels:
        inputs["labels"] = torch.randint(2, (shape.batch,), generator=generator)
    return inputs


def _add_answer(inputs: Inputs, shape: Shape, generator: torch.Generator) -> Inputs:
    """Add what a decoder needs: labels, or its own tokens where there are none."""
    answer = torch.randint(
        FIRST_WORD, VOCABULARY, (shape.batch, max(2, shape.length // 2)), generator=generator
    )
    inputs["labels" if shape.labels else "decoder_input_ids"] = answer
    return inputs


def sequence_to_sequence(shape: Shape) -> Inputs:
    """Tokens for the encoder, and an answer half as long."""
    inputs, generator = _padded_tokens(shape)
    return _add_answer(inputs, shape, generator)


def image(shape: Shape, *, scale: int = 2) -> Inputs:
    """Square images, and one of two classes per image."""
    generator, side = _generator(shape), scale * shape.length
    inputs: Inputs = {"pixel_values": torch.randn(shape.batch, 3, side, side, generator=generator)}
    if shape.labels:
        inputs["labels"] = torch.randint(2, (shape.batch,), generator=generator)
    return inputs


def images_only(shape: Shape, *, scale: int = 2) -> Inputs:
    """Square images for a model whose loss needs no labels."""
    inputs = image(shape, scale=scale)
    inputs.pop("labels", None)
    return inputs


def images_and_text(shape: Shape) -> Inputs:
    """An image and its caption per row; the loss compares all with all."""
    inputs, generator = _padded_tokens(shape)
    inputs["pixel_values"] = torch.randn(shape.batch, 3, 32, 32, generator=generator)
    if shape.labels:
        inputs["return_loss"] = True
    return inputs


def spectrogram(shape: Shape, *, mels: int = 16, frames_first: bool = False) -> Inputs:
    """A fixed number of audio frames, and their words; the length is that of the words."""
    generator = _generator(shape)
    size = (shape.batch, 32, mels) if frames_first else (shape.batch, mels, 32)
    inputs: Inputs = {"input_features": torch.randn(size, generator=generator)}
    return _add_answer(inputs, shape, generator)


def waveform(shape: Shape, *, scale: int = 100) -> Inputs:
    """Raw audio with a mask over samples, and one of two classes per row."""
    generator = _generator(shape)
    size = (shape.batch, scale * shape.length)
    inputs: Inputs = {"input_values": torch.randn(size, generator=generator)}
    mask = _mask(shape, generator)
    if mask is not None:
        inputs["attention_mask"] = mask.repeat_interleave(scale, dim=1)
    if shape.labels:
        inputs["labels"] = torch.randint(2, (shape.batch,), generator=generator)
    return inputs


def images_and_text_only(shape: Shape) -> Inputs:
    """An image and its caption per row, for a model that computes no loss."""
    inputs = images_and_text(shape)
    inputs.pop("return_loss", None)
    return inputs


def fixed_audio(shape: Shape, *, frames: int, mels: int) -> Inputs:
    """Spectrograms of one size, and one of two classes per row."""
    generator = _generator(shape)
    values = torch.randn(shape.batch, frames, mels, generator=generator)
    inputs: Inputs = {"input_values": values}
    if shape.labels:
        inputs["labels"] = torch.randint(2, (shape.batch,), generator=generator)
    return inputs


def time_series(shape: Shape, *, past: int = 10, future: int = 4) -> Inputs:
    """A past that was observed with its dates, and the future to predict."""
    generator = _generator(shape)
    inputs: Inputs = {
        "past_values": torch.randn(shape.batch, past, generator=generator),
        "past_time_features": torch.randn(shape.batch, past, 1, generator=generator),
        "past_observed_mask": torch.ones(shape.batch, past),
        "future_time_features": torch.randn(shape.batch, future, 1, generator=generator),
    }
    if shape.labels:
        inputs["future_values"] = torch.randn(shape.batch, future, generator=generator)
    return inputs
