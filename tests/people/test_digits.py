"""The digits are real and the same in every run; idx files are read as they were written."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from digits import load_digits, load_idx


def idx_bytes(code: int, array: npt.NDArray[Any]) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}i", 0, 0, code, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def test_digits_have_the_promised_form() -> None:
    digits = load_digits()
    assert digits.train_images.shape == (4000, 1, 28, 28)
    assert digits.test_images.shape == (1000, 1, 28, 28)
    assert digits.train_images.dtype == torch.float32
    assert digits.train_labels.dtype == torch.int64
    assert abs(digits.train_images.mean().item()) < 0.02
    assert abs(digits.train_images.std().item() - 1) < 0.02
    assert torch.cat([digits.train_labels, digits.test_labels]).bincount().tolist() == [500] * 10
    # Shuffled: each part holds every digit, none far from a tenth.
    assert min(digits.test_labels.bincount()) > 80


def test_digits_do_not_depend_on_the_global_seed() -> None:
    torch.manual_seed(1)
    first = load_digits()
    state = torch.get_rng_state()
    second = load_digits()
    assert all(map(torch.equal, first, second))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("code", "dtype"), [(0x08, "u1"), (0x09, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4")]
)
def test_an_idx_file_is_read_as_it_was_written(
    tmp_path: Path, code: int, dtype: str, compressed: bool
) -> None:
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    data = idx_bytes(code, array)
    path = tmp_path / "images-idx3"
    path.write_bytes(gzip.compress(data) if compressed else data)
    assert torch.equal(load_idx(path), torch.from_numpy(array))


def test_labels_have_one_dimension(tmp_path: Path) -> None:
    path = tmp_path / "labels-idx1"
    path.write_bytes(idx_bytes(0x08, np.array([7, 2, 1], dtype=np.uint8)))
    assert load_idx(path).tolist() == [7, 2, 1]


def test_a_file_that_is_no_idx_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match="is no idx file"):
        load_idx(path)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images-idx3"
    path.write_bytes(idx_bytes(0x08, np.zeros((2, 28, 28), dtype=np.uint8))[:-5])
    with pytest.raises(ValueError, match=r"should hold \(2, 28, 28\) items, it holds 1563"):
        load_idx(path)
