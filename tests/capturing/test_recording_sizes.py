"""Sizes in opened code follow the input, or are guarded where Python takes a plain number."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capturing.test_recording_checked import WIDTH, Three, assert_as_plain, rows

# What opened code makes of the hidden state between two layers.
Code = Callable[[Tensor], Any]

FOLLOWED: dict[str, Code] = {
    "view(b * t, -1)": lambda h: h.view(h.shape[0] * h.shape[1], -1).view(h.shape),
    "zeros": lambda h: h + torch.zeros(h.size(0), h.size(1), WIDTH),
    "arange": lambda h: h + torch.arange(h.shape[1])[None, :, None],
    "new_ones": lambda h: h + h.new_ones(h.shape[0], 1, 1),
    "full": lambda h: h * torch.full((h.shape[1], 1), h.shape[0]),
    "linspace": lambda h: h * torch.linspace(0, 1, h.shape[1])[:, None],
    "tril": lambda h: h * torch.tril(torch.ones(h.shape[1], h.shape[1]))[-1][:, None],
    "torch.tensor(n)": lambda h: h * torch.tensor(h.shape[1]),
    "torch.tensor(shape)": lambda h: h * torch.tensor(h.shape).sum(),
    "as_tensor": lambda h: h * torch.as_tensor(h.shape[1]),
    "Size + tuple": lambda h: h.reshape(-1, WIDTH).reshape(operator.add(h.shape[:-1], (WIDTH,))),
    "tuple + Size": lambda h: h.reshape(-1, WIDTH).reshape(operator.add((1,), h.shape))[0],
    "unpacked": lambda h: h.reshape(-1, WIDTH).reshape(*h.shape[:2], h.shape[2]),
    "len": lambda h: h * len(h),
    "numel": lambda h: h * h.numel(),
    "size(dim=)": lambda h: h.view(h.size(dim=0), -1, WIDTH) * h.size(dim=-2),
    "negative dims": lambda h: h * h.size(-2) * h.size()[-1] * h.shape[-3],
    "float": lambda h: h * (h.size(1) / 3 + 0.5) ** 2,
    "power": lambda h: h * h.shape[1] ** -0.5,
    "divmod": lambda h: h * divmod(h.shape[1], 2)[0] + divmod(h.shape[1], 2)[1],
    "bits": lambda h: h * (1 << h.shape[1]) * (h.shape[0] | 1) * (~h.shape[1]),
    "math.prod": lambda h: h * math.prod(h.shape[:-1]),
    "reduce": lambda h: h * functools.reduce(operator.mul, h.shape),
    "sum of sizes": lambda h: h * sum(h.shape),
    "slice": lambda h: h[:, : h.shape[1] // 2 + 1],
    "slice from behind": lambda h: h[:, -h.size(1) + 1 :],
    "slice object": lambda h: h[:, slice(0, h.shape[1] // 2 + 1)],
    "index": lambda h: h[torch.arange(h.shape[0]), -1],
    "pad": lambda h: F.pad(h, (0, 0, 0, h.shape[1] % 2)),
    "expand": lambda h: h.expand(2, *h.shape).sum(0),
    "broadcast_shapes": lambda h: h * torch.broadcast_shapes(h.shape, (1, 1, 1))[1],
    "size times tensor": lambda h: h * (h.shape[1] * torch.tensor(3)),
    "data dependent": lambda h: h * h[h[..., 0] > 0].shape[0],
    "nonzero": lambda h: h * (h[..., 0] > 0).nonzero().shape[0],
    "mask": lambda h: h[h[..., 0] > 0],
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "pool": lambda h: F.avg_pool1d(h.transpose(1, 2), h.shape[1]).transpose(1, 2),
    "copied shape": lambda h: torch.empty(h.shape).copy_(h) + torch.zeros_like(h),
}

GUARDED: dict[str, Code] = {
    "range": lambda h: sum(range(h.shape[1] // 2), h),
    "list[n]": lambda h: h * list(range(20))[h.shape[1]],
    "list[:n]": lambda h: h * sum(list(range(20))[: h.shape[1]]),
    "f-string": lambda h: h * float(f"{h.shape[1]}.5"),
    "percent": lambda h: h * float("%d.5" % h.shape[1]),  # noqa: UP031  # C code reads it
    "str(shape)": lambda h: h * str(h.shape).count("5"),
    "math.sqrt": lambda h: h * math.sqrt(h.shape[1]),
    "ceil and floor": lambda h: h * math.ceil(h.size(1) / 3) * math.floor(h.size(0) / 2 + 1),
    "round": lambda h: h * round(h.size(1) / 3) * round(h.size(1) / 3, 1),
    "int(float)": lambda h: h * int(h.size(1) / 3 + 0.5),
    "np.zeros": lambda h: h * float(np.zeros(h.shape[1]).size),
    "np index": lambda h: h * float(np.arange(10)[h.shape[1]]),
    "np.prod": lambda h: h * float(np.prod(h.shape[:-1])),
    "dict.get": lambda h: h * {3: 1.0, 5: 2.0}.get(h.shape[1], 7.0),
    "dict key": lambda h: h * {h.shape: 2.0}.get(torch.Size((3, 5, WIDTH)), 7.0),
    "in shape": lambda h: h * (2 if 5 in h.shape else 3),
    "shape ==": lambda h: h * 2 if h.shape == (3, 5, WIDTH) else h,
    "== shape": lambda h: h * 2 if torch.Size([3, 5, WIDTH]) == h.shape else h,
    "shape <": lambda h: h * 2 if h.shape < (3, 5, WIDTH) else h,
    "shape.index": lambda h: h * (h.shape.index(WIDTH) + 1),
    "shape.count": lambda h: h * (h.shape.count(5) + 1),
    "Size.numel": lambda h: h * h.shape.numel(),
    "hash": lambda h: h * (hash(h.shape) % 7),
    "sorted": lambda h: h * sorted(h.shape)[1],
    "min and max": lambda h: h * min(h.shape) * max(h.shape) * min(h.size(1), 3),
    "[0] * n": lambda h: h * len([0] * h.shape[1]),
    "bytes(n)": lambda h: h * len(bytes(h.shape[1])),
    "complex": lambda h: h * complex(h.shape[1]).real,
    "__index__": lambda h: h * operator.index(h.shape[1]),
    "bit_length": lambda h: h * h.shape[1].bit_length(),
    "stride": lambda h: h * h.stride(0) * h.stride()[1],
}

OTHERS = [(1, 5), (4, 7), (3, 1)]


def between_layers(code: Code) -> Three:
    return Three(lambda self, x: self.b(code(self.a(x))))


@pytest.mark.parametrize("name", [*FOLLOWED, *GUARDED])
def test_a_size_in_opened_code_is_right_for_every_input(name: str) -> None:
    model = between_layers((FOLLOWED | GUARDED)[name])
    assert_as_plain(model, [rows()], *([rows(*sizes)] for sizes in OTHERS))


@pytest.mark.parametrize("name", ["view(b * t, -1)", "arange", "range", "len", "mask", "numel"])
def test_a_size_before_the_cut_is_right_as_well(name: str) -> None:
    model = between_layers((FOLLOWED | GUARDED)[name])
    assert_as_plain(model, [rows()], *([rows(*sizes)] for sizes in OTHERS), split={"b": "begin"})


@pytest.mark.parametrize(
    "code",
    [
        lambda x, h: h * x.shape[1] + torch.zeros(x.shape[0], 1, 1),
        lambda x, h: h * x[x[..., 0] > 0].shape[0],
        lambda x, h: h * 2 if x.shape == h.shape else h,
        lambda x, h: h * x.dim() * h.ndim * len(h.shape),
    ],
)
def test_sizes_of_inputs_used_later(code: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Three(lambda self, x: self.c(code(x, self.b(self.a(x)))))
    assert_as_plain(model, [rows()], *([rows(*sizes)] for sizes in OTHERS), split=["b", "c"])


def test_sizes_as_results() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        h = self.a(x)
        return self.b(h), x.shape[0], x.shape[0] / 2, x.shape[0] > 2, {x.shape[1]: h}, f"{len(x)}"

    assert_as_plain(Three(forward), [rows()], [rows(2, 7)], [rows(1)])


def test_a_loop_over_a_size_unrolls_again_for_another() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        h, steps = self.a(x), x.shape[1]
        while steps > 2:
            h, steps = torch.relu(self.b(h)), steps // 2
        return self.c(h)

    others = [[rows(3, length)] for length in (2, 4, 8, 16)]
    assert_as_plain(Three(forward), [rows()], *others)
