"""Costs written down by hand."""

from __future__ import annotations

import random
from typing import Any

from stageline.partitioning.costs import BlockCosts, ModelCosts


def layers(count: int, *, rows: int = 1, **others: Any) -> ModelCosts:
    """Return a model of equal blocks; times are in proportion to the rows."""
    figures: dict[str, Any] = {
        "forward": 10,
        "input_gradient": 10,
        "weight_gradient": 10,
        "backward": 20,
        "input_bytes": 8,
        "activation_bytes": 32,
        "input_gradient_frees": 16,
        "parameters": 5,
        "parameter_bytes": 20,
        "output_bytes": 8,
        **others,
    }
    blocks = [BlockCosts(f"layer {index}", **figures) for index in range(count)]
    return ModelCosts(tuple(blocks), rows=rows, origin="by hand")


def uneven(count: int, seed: int) -> ModelCosts:
    """Return a model of blocks that all differ."""
    draw = random.Random(seed)
    blocks = []
    for index in range(count):
        inputs, weights = draw.randint(1, 30), draw.randint(1, 30)
        kept = draw.randint(10, 60)
        blocks.append(
            BlockCosts(
                f"block {index}",
                forward=draw.randint(1, 30),
                input_gradient=inputs,
                weight_gradient=weights,
                backward=inputs + weights,
                input_bytes=draw.randint(1, 10),
                activation_bytes=kept,
                input_gradient_frees=draw.randint(0, kept // 2),
                parameters=5,
                parameter_bytes=draw.randint(1, 40),
                output_bytes=draw.randint(1, 10),
            )
        )
    return ModelCosts(tuple(blocks), rows=1, origin="by hand")
