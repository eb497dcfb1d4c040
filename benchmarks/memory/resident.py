"""By how much the resident memory of a contestant's processes grows while it trains.

Only torch and the contestant's own library are imported, for this file also runs in the
environments of the peers. Started by run.py; the answer goes to a file.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import tempfile
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn import functional as F

from benchmarks.memory.held import Trace
from benchmarks.tools.world import free_port, world
from models import CHECKED, Case, stack, vectors
from plain import reference

WIDTH, ROWS = 64, 16384  # 4 MiB an activation
STEPS = CHECKED
MIB = 2**20


def case_of(num_microbatches: int) -> Case:
    """Return 8 times Linear and ReLU: few weights and many rows, so activations are what counts."""
    return Case(
        letter="m",
        title=f"{num_microbatches} microbatches of {ROWS} rows",
        make=stack(WIDTH),
        draw=vectors(WIDTH),
        loss=F.mse_loss,
        rows=ROWS,
        num_microbatches=num_microbatches,
        cuts={2: [8, 8], 4: [4, 4, 4, 4]},
        steps=1,
    )


def status(name: str) -> int:
    """Return an entry of this process's status in bytes: VmHWM is the highest of VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_highest() -> None:
    """Let VmHWM begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def load_code() -> None:
    """Train something small: what a first step loads and never gives back is no activation."""
    net = stack(WIDTH)(0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.mse_loss(net(torch.ones(64, WIDTH)), torch.ones(64, WIDTH)).backward()
    optimizer.step()


def map_every_block() -> None:
    """Let glibc map every large block by itself, and give it back when it is freed.

    Its heap does not use a hole again for an aligned block of the same size, so what is resident
    may be twice what is held, in whichever library.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # stageline then leaves the allocator alone
    ctypes.CDLL(None).mallopt(-3, 65536)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Build a contestant and train: where every block is mapped, the allocator is followed too."""
    trace: AbstractContextManager[Any] = nullcontext()
    if request["mapped"]:
        map_every_block()
        trace = Trace()
    load_code()
    case = case_of(request["microbatches"])
    contestant = importlib.import_module(request["kind"]).build(case, 0.0, **request["options"])
    with trace as seen:
        forget_highest()
        before, shared = status("VmRSS"), status("RssShmem")
        losses = [contestant.step() for _ in range(STEPS)]
        grown, shared = status("VmHWM") - before, status("RssShmem") - shared
        if seen is not None:
            seen.mark("end")
    return {
        "losses": [None if loss is None else float(loss) for loss in losses],
        "resident": grown / MIB,
        "shared": shared / MIB,
        "tensors": None if seen is None else seen.moments[0].highest / MIB,
    }


def forked(request: dict[str, Any], folder: Path) -> list[Any]:
    """Run the processes of a contestant; return what each of them says, None where one failed."""
    size, port, children = request["processes"], free_port(), []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ.update(world(rank, size, port) | request["environment"])
            try:
                (folder / str(rank)).write_text(json.dumps(run(request)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # an exit in the usual way waits for ever for fairscale's threads
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    files = [folder / str(rank) for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def main() -> None:
    """Import once, then fork every process of every contestant."""
    answer, _, module, told, num_microbatches = sys.argv[1:]
    torch.set_num_threads(1)
    importlib.import_module(module)
    with Trace() as trace:  # starting the profiler for the first time takes a second
        trace.mark("warm")
    found = []
    for request in json.loads(told):
        with tempfile.TemporaryDirectory() as folder:
            found.append(forked(request, Path(folder)))
    wanted = reference(case_of(int(num_microbatches)), tied=True)
    Path(answer).write_text(json.dumps({"found": found, "losses": wanted}))


if __name__ == "__main__":
    main()
