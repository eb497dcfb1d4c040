"""Writes docs/models.md: which models of transformers can be cut, and with which inputs.

python -m tests.models.table                  check all models and write the page
python -m tests.models.table --only GPT-2 T5  check some and print what happened, in full
python -m tests.models.table --redo GPT-2 T5  check some again and rewrite their rows
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.models.further import FURTHER
from tests.models.kinds import KINDS, Kind, Outcome, Subject, check_pipeline, check_plan
from tests.models.local import LOCAL
from tests.models.zoo import TWENTY

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
SPLITS = (2, 3, 4)
GROUPS: tuple[tuple[str, str, Sequence[Subject], Sequence[int]], ...] = (
    (
        "The twenty",
        "Each cut into 2, 3 and 4 stages; a cell is the worst of the three.",
        TWENTY,
        SPLITS,
    ),
    ("Further models", "Each cut into 3 stages.", FURTHER, (3,)),
    ("Models written in the tests", "Each cut into 2, 3 and 4 stages.", LOCAL, SPLITS),
)
ORDER = ("no plain", "exact", "close", "refused", "crash", "WRONG")
CELLS = {"exact": "=", "close": "~", "no plain": "", "WRONG": "**WRONG**"}
PIPELINED = "pipelined"
Row = dict[str, Outcome]

HEAD = """# Models that can be cut

Models of the transformers library {version} and some written in our tests, unchanged, with random
weights and tiny configurations; torch {torch}. Each is captured on one input and run on another;
outputs with their types, loss, all gradients and all buffers are compared with those of the plain
model. `python -m tests.models.table` writes this page.

| cell | meaning |
|---|---|
| = | equal to the last bit, in train mode with dropout too |
| ~ | the same, but gradients of parameters that several stages share differ by up to 1e-6 [^] |
| 1, 2, .. | an error says why not; the numbered list below the table gives it |
| empty | the model takes no such input |

| column | captured on | run with |
|---|---|---|
{columns}
| pipelined | 4 rows | 5 rows in 2 microbatches, two accumulating steps, train mode with dropout |

[^] Relative to the largest value of the gradient: its parts are added up in another order.

The library returns caches (`past_key_values`) that nobody asked for when it is called without
`use_cache=False`; a plan leaves them out, and so does the plain model that it is compared with: a
cache lays keys and values out anew, for which attention rounds differently on some processors.
"""

MEANING = {
    "new data": ("4 rows of 16 tokens with labels, train mode", "other rows of that size"),
    "no labels": ("the same without labels", "other rows without labels"),
    "batch 3": ("4 rows", "3 rows"),
    "batch 1": ("4 rows", "1 row"),
    "batch 1 to 4": ("1 row", "4 rows"),
    "length": ("16 tokens", "another length, or images of another size"),
    "ones to padded": ("a mask of ones", "padded rows"),
    "padded to ones": ("padded rows", "a mask of ones"),
    "other padding": ("padded rows", "rows padded otherwise, on the same side"),
    "other side": ("padded rows", "rows padded on the other side"),
    "no mask": ("no mask", "no mask"),
    "eval": ("eval mode", "eval mode"),
    "train to eval": ("train mode", "eval mode"),
    "eval to train": ("eval mode", "train mode"),
}


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome that a reader must know about."""
    return max(outcomes, key=lambda outcome: ORDER.index(outcome.verdict))


def check(subject: Subject, kinds: Sequence[Kind], splits: Sequence[int]) -> Row:
    """Return the outcomes of a model by column."""
    row = {
        kind.name: worst([check_plan(subject, kind, split) for split in splits])
        for kind in kinds
        if kind.fits(subject)
    }
    row[PIPELINED] = worst([check_pipeline(subject, split) for split in splits])
    return row


class Page:
    """Collects rows, numbers the errors and prints Markdown."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}

    def cell(self, outcome: Outcome | None) -> str:
        if outcome is None:
            return ""
        if outcome.verdict in CELLS:
            return CELLS[outcome.verdict]
        first, *rest = outcome.details
        message = " ".join([first, *rest[:1]]) if first.endswith(":") else first
        number = self.errors.setdefault(message, len(self.errors) + 1)
        return str(number) if outcome.verdict == "refused" else f"**{number}**"

    def table(self, rows: dict[str, Row]) -> Iterator[str]:
        columns = [*(kind.name for kind in KINDS), PIPELINED]
        yield f"| model | {' | '.join(columns)} |"
        yield "|---|" + ":-:|" * len(columns)
        for name, row in rows.items():
            yield f"| {name} | {' | '.join(self.cell(row.get(c)) for c in columns)} |"

    def reasons(self) -> Iterator[str]:
        for message, number in self.errors.items():
            yield f"{number}. `{message.replace('`', chr(39))}`"


def columns() -> str:
    """Return the rows that explain the columns."""
    return "\n".join(f"| {kind.name} | {' | '.join(MEANING[kind.name])} |" for kind in KINDS)


def write() -> None:
    """Check everything and write the page."""
    import transformers

    page, begin = Page(), time.perf_counter()
    lines = [
        HEAD.format(
            version=transformers.__version__,
            torch=torch.__version__.split("+")[0],
            columns=columns(),
        )
    ]
    for title, text, subjects, splits in GROUPS:
        rows = {}
        for subject in subjects:
            rows[subject.name] = check(subject, KINDS, splits)
            seconds = time.perf_counter() - begin
            print(f"{seconds:6.0f} s  {subject.name}", file=sys.stderr, flush=True)
        lines += [f"## {title}\n", f"{text}\n", *page.table(rows), ""]
    if page.errors:
        lines += ["## What the errors say\n", *page.reasons(), ""]
    PAGE.write_text("\n".join(lines))


def redo(names: Sequence[str]) -> None:
    """Check some models again and rewrite their rows of the page."""
    lines = PAGE.read_text().splitlines()
    listed = [re.match(r"(\d+)\. `(.*)`$", line) for line in lines]
    page = Page()
    page.errors = {
        found[2]: int(found[1]) for found in listed if found and not found[2].endswith(":")
    }
    for subject, splits in ((s, cut) for _, _, group, cut in GROUPS for s in group):
        if subject.name not in names:
            continue
        *_, row = page.table({subject.name: check(subject, KINDS, splits)})
        places = [i for i, line in enumerate(lines) if line.startswith(f"| {subject.name} |")]
        lines[places[0]] = row
        print(row, file=sys.stderr, flush=True)
    kept = [line for line, found in zip(lines, listed, strict=True) if not found]
    PAGE.write_text("\n".join([*kept, *page.reasons(), ""]).replace("\n\n\n", "\n\n"))


def show(names: Sequence[str], columns: Sequence[str], splits: Sequence[int]) -> None:
    """Check some models and print every outcome that is not right, with its traceback."""
    for subject in (subject for _, _, group, _ in GROUPS for subject in group):
        if subject.name not in names:
            continue
        kinds = [kind for kind in KINDS if not columns or kind.name in columns]
        for name, outcome in check(subject, kinds, splits).items():
            print(
                f"{subject.name:16} {name:16} {outcome if not outcome.is_right else ''}"
                f"{outcome.verdict if outcome.is_right else ''}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Check models of transformers.")
    parser.add_argument("--only", nargs="+", default=[], help="names of models; nothing is written")
    parser.add_argument(
        "--redo", nargs="+", default=[], help="names of models; rewrites their rows"
    )
    parser.add_argument("--kinds", nargs="+", default=[], help="with --only: names of columns")
    parser.add_argument("--splits", nargs="+", type=int, default=[3], help="with --only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # results are compared to the last bit
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
    if arguments.redo:
        redo(arguments.redo)
    elif arguments.only:
        show(arguments.only, arguments.kinds, arguments.splits)
    else:
        write()


if __name__ == "__main__":
    main()
