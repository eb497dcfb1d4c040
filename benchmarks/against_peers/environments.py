"""The peers' own environments: made on request, by exact versions, never part of the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"

COMMON = [
    "torch==2.13.0",
    "numpy==2.4.6; python_version >= '3.11'",
    "numpy==2.2.6; python_version < '3.11'",
    "setuptools==84.2.1",
    "wheel==0.48.0",
]
PEERS = {
    "fairscale": ["fairscale==0.4.13"],
    "torchgpipe": ["torchgpipe==0.0.7"],
    "deepspeed": ["deepspeed==0.19.8"],
}
NEEDED = {
    "deepspeed": [
        "einops==0.8.2",
        "hjson==3.1.0",
        "msgpack==1.2.4",
        "ninja==1.13.2",
        "packaging==26.3",
        "psutil==7.2.2",
        "py-cpuinfo==9.0.0",
        "pydantic==2.14.3",
        "tqdm==4.70.1",
    ]
}


def python_of(name: str | None, folder: Path) -> Path:
    """Return the interpreter of a peer's environment; without a name, that of the project."""
    return Path(sys.executable) if name is None else folder / name / "bin" / "python"


def install(folder: Path, names: list[str]) -> None:
    """Make the environments that are not there yet."""
    for name in names:
        python = python_of(name, folder)
        ready = folder / name / ".ready"
        if ready.exists():
            continue
        print(f"installing {', '.join(PEERS[name])} into {folder / name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        subprocess.run([*pip, *COMMON, *NEEDED.get(name, [])], check=True)
        # What they ask for besides is older than their use of it, or for GPUs.
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", *PEERS[name]], check=True)
        ready.touch()
