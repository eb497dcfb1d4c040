"""Which functions of torch draw random numbers, as a function mode gets to see them.

A call of one of these counts as one draw, whatever its arguments say: dropout in eval mode counts
too, so that train and eval count alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.torch_private import native_functions

DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_})
"""Those that have a faster way of their own."""

# What torch itself marks as nondeterministic_seeded, as functions and as methods of tensors.
_OPERATIONS = """
    _sample_dirichlet _standard_gamma alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial
    cauchy_ dropout dropout_ exponential_ feature_alpha_dropout feature_alpha_dropout_
    feature_dropout feature_dropout_ geometric_ gru log_normal_ lstm multinomial native_dropout
    normal normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm
    rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ uniform_
    scaled_dot_product_attention _scaled_dot_product_attention_math _fused_dropout
"""

# Functions written in Python, which use those.
_COMPOSITES = """
    alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout
    fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices gumbel_softmax
    multi_head_attention_forward rrelu
"""
_LINEAR_ALGEBRA = ("svd_lowrank", "pca_lowrank", "lobpcg")
_NOT_RANDOM = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_", "calculate_gain"})


def _found() -> Iterator[Any]:
    for place in (torch, Tensor, native_functions):
        for name in _OPERATIONS.split():
            if hasattr(place, name):
                yield getattr(place, name)
    for name in _COMPOSITES.split():
        yield getattr(F, name)
    for name in _LINEAR_ALGEBRA:
        yield getattr(torch, name)
    for name in dir(nn.init):
        if name.endswith("_") and not name.startswith("_") and name not in _NOT_RANDOM:
            yield getattr(nn.init, name)


DRAWING = frozenset(_found())
"""All functions that may draw."""
