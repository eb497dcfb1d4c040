"""How much does a rank hold, against the simulator and against the peers? See README.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "against_peers"))

import stageline as sl
from benchmarks.memory.processes import PATIENCE, Failed, run
from benchmarks.tools.pages import Setting, table, write
from environments import FOLDER, python_of

HERE = Path(__file__).resolve().parent
RANKS, MICROBATCHES, MORE = 2, 8, 32
KIB = 1024
TOLERANCE = 1e-4  # of a loss, relative
RUNNABLE = [
    name
    for name in sl.schedules.NAMES
    if sl.schedules.family(name).refusal is None and name != "forward-only"
]


@dataclass(frozen=True)
class Entry:
    """A contestant whose processes are looked at.

    Attributes:
        name: In the table.
        kind: The file of benchmarks/against_peers that builds it.
        options: What that file is told besides.
        processes: How many it has.
        home: The package whose environment it runs in.
        variables: Of the environment.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    processes: int = RANKS
    home: str = "stageline"
    variables: dict[str, str] = field(default_factory=dict)

    def request(self, *, mapped: bool, microbatches: int = MICROBATCHES) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "options": self.options,
            "processes": self.processes,
            "environment": self.variables,
            "mapped": mapped,
            "microbatches": microbatches,
        }


def ours(name: str) -> Entry:
    stages = sl.schedules.family(name).num_stages(RANKS)
    return Entry(f"stageline, {name}", "ours", {"schedule": name, "stages": stages})


OURS, TORCH = ours("1f1b"), Entry("torch pipelining, 1F1B", "torch_pipelining")
TORCH_MORE = {"GPipe": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4}
EVERYBODY = [
    Entry("plain", "plain", processes=1),
    *map(ours, RUNNABLE),
    Entry("stageline, 1f1b, KEEP_MEMORY=0", "ours", variables={"STAGELINE_KEEP_MEMORY": "0"}),
    TORCH,
    *(
        Entry(f"torch pipelining, {name}", "torch_pipelining", {"schedule": name, "stages": stages})
        for name, stages in TORCH_MORE.items()
    ),
    Entry("DeepSpeed PipelineModule", "deepspeed_pipe", home="deepspeed"),
    Entry("fairscale Pipe", "fairscale_pipe", processes=1, home="fairscale"),
    Entry("torchgpipe GPipe", "torchgpipe_pipe", processes=1, home="torchgpipe"),
]


def counts() -> str:
    """Return the table of what is alive between actions, every schedule on four ranks."""
    (answers,) = run(Path(sys.executable), "counted.py", 1, RUNNABLE)
    rows = []
    for name in RUNNABLE:
        ranks = [answer[name] for answer in answers]
        cells = [_each(rank[key] for rank in ranks) for key in ("simulated", "counted")]
        for key in ("simulated bytes", "bytes", "within"):
            cells += [_each(round(rank[key] / KIB) for rank in ranks)]
        wrong = ": wrong gradients" if any(rank["wrong"] for rank in ranks) else ""
        rows.append([name + wrong, *cells])
    head = ["", "simulator", "counted", "simulator, KiB", "held, KiB", "while an action runs, KiB"]
    return table(head, rows)


def _each(values: Iterator[Any]) -> str:
    return " ".join(map(str, values))


def residents(entries: Sequence[Entry], folder: Path, *, with_heap: bool) -> str:
    """Return the table of resident memory."""
    mapped = measured(entries, folder, mapped=True)
    heap = measured(entries, folder, mapped=False) if with_heap else {}
    rows = []
    for entry in entries:
        one, other = mapped[entry.name], heap.get(entry.name)
        if isinstance(one, str):
            rows.append([entry.name, one, "", "", ""])
            continue
        has_threads = entry.processes == 1 and entry.kind != "plain"
        tensors = "" if has_threads else _each(f"{each['tensors']:.0f}" for each in one)
        shown = "" if other is None or isinstance(other, str) else _cells(other, "resident")
        rows.append([entry.name, tensors, _cells(one, "resident"), shown, _cells(one, "shared")])
    head = ["MiB of each process", "tensors", "resident", "resident, heap", "of it shared"]
    return table(head, rows)


def growth(folder: Path) -> str:
    """Return the table of what more microbatches of the same size need."""
    rows = []
    few = measured([OURS, TORCH], folder, mapped=True)
    many = measured([OURS, TORCH], folder, mapped=True, microbatches=MORE)
    for entry in (OURS, TORCH):
        for count, found in ((MICROBATCHES, few[entry.name]), (MORE, many[entry.name])):
            if isinstance(found, str):
                rows.append([entry.name, str(count), found, "", ""])
                continue
            keys = ("tensors", "resident", "shared")
            rows.append([entry.name, str(count), *(_cells(found, key) for key in keys)])
    return table(["MiB of each process", "m", "tensors", "resident", "of it shared"], rows)


def _cells(found: Sequence[dict[str, float]], key: str) -> str:
    return _each(f"{each[key]:.0f}" for each in found)


def measured(
    entries: Sequence[Entry], folder: Path, *, mapped: bool, microbatches: int = MICROBATCHES
) -> dict[str, Any]:
    """Run contestants; return what their processes say, or in a sentence why there is nothing."""
    found: dict[str, Any] = {}
    for home in dict.fromkeys(entry.home for entry in entries):
        mine = [entry for entry in entries if entry.home == home]
        requests = [entry.request(mapped=mapped, microbatches=microbatches) for entry in mine]
        python = python_of(None if home == "stageline" else home, folder)
        try:
            if not python.exists():
                raise Failed("not installed: against_peers/run.py --install")
            told = [home, json.dumps(requests), str(microbatches)]
            patience = PATIENCE * len(mine)
            variables = _variables(python)
            (answer,) = run(python, "resident.py", 1, told, variables, patience=patience)
        except Failed as failure:
            found |= {entry.name: str(failure) for entry in mine}
            continue
        for entry, processes in zip(mine, answer["found"], strict=True):
            found[entry.name] = _checked(processes, answer["losses"])
    return found


def _variables(python: Path) -> dict[str, str]:
    if python == Path(sys.executable):
        return {}
    extensions = str(python.parents[1] / "extensions")
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}


def _checked(processes: list[Any], wanted: Sequence[float]) -> Any:
    """Return what processes say if their losses are those of the plain model."""
    if None in processes:
        return "a process of it failed: see build/memory"
    losses = next((one["losses"] for one in processes if None not in one["losses"]), None)
    if losses is None:
        return "it showed no loss"
    pairs = zip(losses, wanted, strict=True)
    if not all(math.isclose(loss, want, rel_tol=TOLERANCE) for loss, want in pairs):
        return f"wrong: losses {losses}, the plain model's are {wanted}"
    return processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="counts, and two contestants")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="where environments are")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    asked = parser.parse_args()
    setting = Setting()
    parts = {"counts": counts()}
    print(parts["counts"], flush=True)
    entries = [OURS, TORCH] if asked.short else EVERYBODY
    parts["resident"] = residents(entries, asked.peers, with_heap=not asked.short)
    print(f"\n{parts['resident']}", flush=True)
    if not asked.short:
        parts["growth"] = growth(asked.peers)
        print(f"\n{parts['growth']}", flush=True)
    print(f"\n{setting}")
    if asked.write:
        for section, text in {**parts, "setting": str(setting)}.items():
            write(HERE / "README.md", section, text)


if __name__ == "__main__":
    main()
