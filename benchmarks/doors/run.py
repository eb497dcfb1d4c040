"""What do the doors cost, and are they faster than what they stand for? See README.md."""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import chain
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "against_peers"))

from environments import FOLDER
from lineup import Entry
from models import CASES
from race import Nurseries, race
from results import Outcome
from table import ratio, setting

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: begin, written by run.py --write -->", "<!-- results: end -->"
PIPPY, FAIRSCALE = "stageline.compat.pippy", "stageline.compat.fairscale.nn"
GPIPE = "stageline.compat.torchgpipe"


def _entry(name: str, kind: str, **options: str | int) -> Entry:
    environment = str(options.pop("environment", "")) or None
    processes = int(options.pop("processes", 2))
    return Entry(name, kind, options, processes, 1, environment, in_every_heat=True)


def trios() -> list[tuple[Entry, ...]]:
    """Return the original, its door, and the same on stageline without a door; last an A/A."""
    return [
        (
            _entry("torch.distributed.pipelining, 1F1B", "torch_pipelining"),
            _entry("its door, 1F1B", "torch_pipelining", home=PIPPY),
            _entry("stageline processes, 1f1b", "ours"),
        ),
        (
            _entry("torch.distributed.pipelining, GPipe", "torch_pipelining", schedule="GPipe"),
            _entry("its door, GPipe", "torch_pipelining", schedule="GPipe", home=PIPPY),
            _entry("stageline processes, gpipe", "ours", schedule="gpipe"),
        ),
        (
            _entry("fairscale Pipe", "fairscale_pipe", processes=1, environment="fairscale"),
            _entry("its door, Pipe", "fairscale_pipe", processes=1, home=FAIRSCALE),
            _entry("stageline threads, pipe(x)", "ours", processes=1, schedule="gpipe", calls=1),
        ),
        (
            _entry("torchgpipe GPipe", "torchgpipe_pipe", processes=1, environment="torchgpipe"),
            _entry("its door, GPipe in threads", "torchgpipe_pipe", processes=1, home=GPIPE),
            _entry("the same again (A/A)", "ours", processes=1, schedule="gpipe", calls=1),
        ),
    ]


def markdown(outcome: Outcome) -> str:
    """Return the table of a case; ratios above 1 mean that the door is the faster one."""
    rows = [
        f"**({outcome.case.letter}) {outcome.case.title}.**",
        "",
        "| original | ms | its door | door over original | without a door | door over that |",
        "|---|---|---|---|---|---|",
    ]
    native = "stageline threads, pipe(x)"
    for original, door, plain in trios():
        against = native if plain.name.startswith("the same") else plain.name
        cells = [
            original.name,
            _time(outcome, original.name),
            _time(outcome, door.name),
            _ratio(outcome, original.name, door.name),
            _time(outcome, against),
            _ratio(outcome, against, door.name),
        ]
        if original.name in outcome.seconds or door.name in outcome.seconds:
            rows.append(f"| {' | '.join(cells)} |")
    again = _ratio(outcome, native, "the same again (A/A)")
    failures = [f"{name}: {why}" for name, why in outcome.failures.items()]
    heats = max(map(len, outcome.seconds.values()), default=0)
    rows += ["", f"A/A {again}; {heats} heats of {outcome.case.laps} laps. {'; '.join(failures)}"]
    return "\n".join(rows).rstrip()


def _time(outcome: Outcome, name: str) -> str:
    heats = outcome.seconds.get(name)
    return f"{1000 * statistics.median(chain(*heats.values())):.2f}" if heats else ""


def _ratio(outcome: Outcome, over: str, under: str) -> str:
    found = ratio(outcome, over, under)
    return "" if found is None else f"{found:.2f}"


def write(outcomes: list[Outcome]) -> None:
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    said = "\n\n".join([f"**Setting.** {setting(outcomes)}", *map(markdown, outcomes)])
    readme.write_text(f"{before}{BEGIN}\n{said}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one case, no installed peers")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="where their environments are")
    parser.add_argument("--cases", default="", help="letters of the cases of against_peers")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    asked = parser.parse_args()
    entries = [entry for trio in trios() for entry in trio]
    if asked.short:
        entries = [entry for entry in entries if entry.environment is None]
    outcomes = []
    with Nurseries(asked.peers) as nurseries:
        for letter in asked.cases or ("b" if asked.short else "bcde"):
            case = CASES[letter]
            outcome = race(case, entries, asked.rounds or (3 if asked.short else 10), nurseries)
            print(f"{markdown(outcome)}\n", flush=True)
            outcomes.append(outcome)
    print(setting(outcomes))
    if asked.write:
        write(outcomes)


if __name__ == "__main__":
    main()
