"""Devices in TOML files: read, and refused with all that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline.errors import ConfigError
from stageline.partitioning import device as described
from stageline.partitioning.device import Device, Link

EXAMPLE = Path(__file__).parents[2] / "examples" / "device.toml"


def test_the_example_is_read() -> None:
    found = Device.load(EXAMPLE)
    assert found.memory == 80 << 30
    assert found.speed("bfloat16") == 0.5 * 312e12
    assert found.speed("float64") == found.speed("float32")
    assert found.between(0, 7) == found.link
    assert found.between(7, 8) == found.network


def test_the_file_in_the_text_is_one(tmp_path: Path) -> None:
    assert described.__doc__ is not None
    path = tmp_path / "a100.toml"
    path.write_text(described.__doc__.split("\n", 1)[1])
    assert Device.load(path) == Device.load(EXAMPLE)


def test_what_is_left_out_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text("bandwidth = 1e9\nflops = {bfloat16 = 4e9, float16 = 2e9}\n")
    found = Device.load(path)
    assert (found.name, found.memory, found.overhead) == ("tiny", None, 0)
    assert found.speed("float32") == 2e9  # the slowest that is given
    assert found.between(0, 9) == Link()


def test_all_that_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        """
        name = 3
        memory = "much"
        efficency = 0.5
        overhead = -1
        ranks_per_host = 0
        network = 5
        [flops]
        float32 = "fast"
        [link]
        speed = 3
        latency = -2
        bandwidth = 0
        """
    )
    with pytest.raises(ConfigError) as caught:
        Device.load(path)
    assert caught.value.findings == (
        "efficency: is not known, did you mean efficiency?",
        "bandwidth: is missing",
        "overhead = -1: wanted a number of at least 0",
        "name = 3: wanted text",
        "memory = 'much': wanted bytes, or text like '80GiB'",
        "ranks_per_host = 0: wanted a whole number of at least 1",
        "flops.float32 = 'fast': wanted a number above 0",
        "link.speed: is not known",
        "link.bandwidth = 0: wanted a number above 0",
        "link.latency = -2: wanted a number of at least 0",
        "network = 5: wanted a table, [network]",
    )


@pytest.mark.parametrize("text", [None, "name = ", b"\xff"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str | bytes | None) -> None:
    path = tmp_path / "device.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="it cannot be read"):
        Device.load(path)


def test_names() -> None:
    assert Device.named("h100").memory == 80 << 30
    with pytest.raises(ConfigError, match=r"wanted one of 'cpu', .*Did you mean 'A100'\?"):
        Device.named("A10")
