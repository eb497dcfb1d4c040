"""Is stageline ahead of its peers, and how close to the limit? See README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import lineup
import table
from environments import FOLDER, PEERS, install
from models import CASES, Case
from plot import svg
from race import Nurseries, race
from results import Outcome, save, saved

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: begin, written by run.py --write -->", "<!-- results: end -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="two small cases, no installed peers")
    parser.add_argument("--install", action="store_true", help="make the peers' environments")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="where these environments are")
    parser.add_argument("--cases", default="", help="letters of the cases, such as abd")
    parser.add_argument("--only", default="", help="entries whose names hold one of these, a,b,...")
    parser.add_argument("--rounds", type=int, default=0, help="in which each has one turn or more")
    parser.add_argument("--write", action="store_true", help="put tables and plot into this folder")
    return parser.parse_args()


def entries(case: Case, asked: argparse.Namespace) -> list[lineup.Entry]:
    everybody = lineup.short() if asked.short else lineup.full(case)
    wanted = [part.strip() for part in asked.only.split(",") if part.strip()]
    always = (lineup.PLAIN, lineup.TORCH, lineup.LIMIT)
    return [
        entry
        for entry in everybody
        if not wanted or entry.name in always or any(part in entry.name for part in wanted)
    ]


def write(outcomes: list[Outcome]) -> None:
    """Replace the results in README.md and the picture beside it."""
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    tables = [table.markdown(outcome) for outcome in outcomes]
    said = "\n\n".join([f"**Setting.** {table.setting(outcomes)}", *tables])
    readme.write_text(f"{before}{BEGIN}\n{said}\n{END}{after}")
    (HERE / "throughput.svg").write_text(svg(outcomes))


def main() -> None:
    asked = arguments()
    if asked.install:
        install(asked.peers, list(PEERS))
        return
    letters = asked.cases or ("ab" if asked.short else "".join(CASES))
    raced: list[Outcome] = []
    with Nurseries(asked.peers) as nurseries:
        for letter in letters:
            case = CASES[letter]
            rounds = asked.rounds or (5 if asked.short else case.rounds)
            outcome = race(case, entries(case, asked), rounds, nurseries)
            print(f"{table.markdown(outcome)}\n", flush=True)
            raced.append(outcome)
            if not asked.short and not asked.only:
                save(outcome)
    print(table.setting(raced))
    if asked.write:
        write(saved())  # of this run, and for other cases the last one


if __name__ == "__main__":
    main()
