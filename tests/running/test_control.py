"""The hub decides for all ranks: first failure, commit, rows, silence, farewell."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stageline
from stageline.running.control.agreement import DIGESTS, DRAWS, HELD, LEAVES, PURPOSE, ROWS, SEED
from stageline.running.control.failures import Failure
from stageline.running.control.hub import Hub, Tell
from stageline.running.control.messages import Message

BATCH = {"args[0]": "float32 (8, 4)"}


class Room:
    """A hub, and what it has told each rank."""

    def __init__(self, num_ranks: int = 3) -> None:
        self.told: dict[int, list[Message]] = {rank: [] for rank in range(num_ranks)}
        self.files: list[bytes] = []
        self.dropped: list[int] = []
        self.deaf: set[int] = set()
        tell = {rank: self._tell(rank) for rank in range(num_ranks)}
        self.hub = Hub(num_ranks, tell, self.dropped.append)

    def _tell(self, rank: int) -> Tell:
        def tell(message: Message, files: Sequence[int] = ()) -> None:
            if rank in self.deaf:
                raise OSError("broken pipe")
            self.told[rank].append(message)
            self.files += [os.read(file, 1) for file in files]

        return tell

    def begin(self, rank: int, facts: dict[str, Any] | None = None, *, epoch: int = 0) -> None:
        known = {PURPOSE: "a training step", SEED: None, ROWS: 8, LEAVES: BATCH, **(facts or {})}
        self.hub.hear(rank, {"kind": "begin", "epoch": epoch, "facts": known})

    def done(self, rank: int, epoch: int = 0, value: Any = None) -> None:
        self.hub.hear(rank, {"kind": "done", "epoch": epoch, "value": value})

    def fail(self, rank: int, text: str, epoch: int = 0) -> None:
        failure = Failure(rank, epoch, text)
        self.hub.hear(rank, {"kind": "fail", "failure": failure.to_json()})

    def kinds(self, rank: int) -> list[str]:
        return [message["kind"] for message in self.told[rank]]

    def failures(self, rank: int) -> list[str]:
        return [m["failure"]["text"] for m in self.told[rank] if m["kind"] == "fail"]

    def same_failure_everywhere(self) -> str:
        heard = {tuple(self.failures(rank)) for rank in self.told}
        assert len(heard) == 1, heard
        (only,) = heard.pop()
        return only


def test_a_call_is_over_when_all_are_done_and_not_before() -> None:
    room = Room()
    for rank in (2, 0, 1):
        room.begin(rank)
    room.done(0)
    room.done(2, value=[1.5])
    assert all(room.kinds(rank) == [] for rank in room.told)
    room.done(1)
    wanted = [{"kind": "commit", "epoch": 0, "values": {"2": [1.5]}}]
    assert all(room.told[rank] == wanted for rank in room.told)


def test_the_first_failure_of_a_call_wins() -> None:
    room = Room()
    for rank in room.told:
        room.begin(rank)
    room.fail(2, "rank 2 has no more paper")
    room.fail(0, "rank 0 heard of it, and says something else")
    assert room.same_failure_everywhere() == "rank 2 has no more paper"


def test_a_failed_call_is_never_committed() -> None:
    room = Room()
    for rank in room.told:
        room.begin(rank)
    room.done(0)
    room.done(1)
    room.fail(2, "rank 2 has no more paper")
    room.done(2)
    assert all(room.kinds(rank) == ["fail"] for rank in room.told)


def test_a_call_that_is_over_cannot_fail_any_more() -> None:
    """A rank that hears of the commit late may fail meanwhile; the others have returned."""
    room = Room()
    for rank in room.told:
        room.begin(rank)
        room.done(rank)
    room.fail(1, "too late")
    assert all(room.kinds(rank) == ["commit"] for rank in room.told)


def test_whoever_begins_a_failed_call_late_is_told_at_once() -> None:
    room = Room()
    room.begin(0)
    room.fail(0, "rank 0 has no more paper")
    room.begin(2)
    assert room.failures(2)[-1] == "rank 0 has no more paper"


def test_the_call_after_a_failed_one_works() -> None:
    room = Room()
    for rank in room.told:
        room.begin(rank)
    room.fail(1, "rank 1 has no more paper")
    for rank in room.told:
        room.begin(rank, epoch=1)
        room.done(rank, epoch=1)
    assert all(room.kinds(rank) == ["fail", "commit"] for rank in room.told)


def test_a_rank_without_a_batch_is_told_its_rows_whoever_comes_first() -> None:
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        room = Room()
        for rank in order:
            room.begin(rank, {} if rank == 0 else {ROWS: None, LEAVES: {}})
        assert room.told[0] == []
        for rank in (1, 2):
            assert room.told[rank] == [{"kind": "rows", "epoch": 0, "rows": 8}], order


SAME_BATCH = (
    "Every rank must call with the same batch: call torch.manual_seed before you make random "
    "batches, and read data in the same order on every rank"
)
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (
        {LEAVES: {"args[0]": "float32 (6, 4)"}, ROWS: 6},
        "rank 1 was given another batch than rank 0: args[0] is float32 (6, 4) on rank 1 and "
        "float32 (8, 4) on rank 0. " + SAME_BATCH,
    ),
    "dtype": (
        {LEAVES: {"args[0]": "float64 (8, 4)"}},
        "rank 1 was given another batch than rank 0: args[0] is float64 (8, 4) on rank 1 and "
        "float32 (8, 4) on rank 0. " + SAME_BATCH,
    ),
    "rows only": (
        {LEAVES: {"target": "int64 (6,)"}, ROWS: 6},
        "rank 1 was given another batch than rank 0: the batch is 6 rows long on rank 1 and 8 rows "
        "long on rank 0. " + SAME_BATCH,
    ),
    "mode": (
        {PURPOSE: "an evaluation step"},
        "rank 1 is at an evaluation step, rank 0 at a training step: every rank must make the "
        "same calls in the same order and mode",
    ),
    "seed": (
        {SEED: 7, DRAWS: True},
        "rank 1 has another seed than rank 0: torch.manual_seed was called with 7 on rank 1 and "
        "with None on rank 0 (None: not at all). Call it with the same number on every rank",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_ranks_that_differ_are_named_with_both_values(what: str, order: tuple[int]) -> None:
    facts, sentence = DISAGREEMENTS[what]
    room = Room(2)
    for rank in order:
        room.begin(rank, facts if rank == 1 else {})
    assert room.same_failure_everywhere() == sentence


def test_ranks_hear_what_each_was_given_once_all_have_said_it() -> None:
    room = Room(3)
    held = {rank: {"arguments": ["args[0]"] if rank else [], "target": False} for rank in room.told}
    for rank in room.told:
        assert room.told[0] == []
        room.begin(rank, {HELD: held[rank]})
    told = {"kind": "held", "epoch": 0, "held": {str(rank): held[rank] for rank in held}}
    assert [room.told[rank] for rank in room.told] == [[told]] * 3


def test_a_rank_that_does_not_say_what_it_was_given_lets_no_other_wait() -> None:
    room = Room(2)
    room.begin(0, {HELD: {"arguments": [], "target": False}})
    room.begin(1)
    assert room.same_failure_everywhere() == (
        "rank 1 has made such a call before, rank 0 has not: every rank must make the same calls "
        "in the same order"
    )


def test_ranks_that_built_different_pipelines_are_asked_for_the_details() -> None:
    """Digests are short; the whole is told only where they differ, by two ranks, once."""
    room = Room(3)
    for rank in room.told:
        room.begin(rank, {DIGESTS: {"the model": "aaa", "the schedule": f"{rank == 2}"}})
    asked = {"kind": "detail", "epoch": 0, "what": "the schedule"}
    assert [room.told[rank] for rank in room.told] == [[asked], [], [asked]]
    for rank in room.told:
        room.done(rank)  # nobody waits for the answer before it goes on
    for rank, name in ((2, "gpipe"), (0, "1f1b")):
        facts = {"name": name, "microbatches": 4}
        room.hub.hear(rank, {"kind": "detail", "epoch": 0, "facts": facts})
    assert room.same_failure_everywhere() == (
        "ranks 0 and 2 have built different pipelines: they differ in the schedule: name is 1f1b "
        "on rank 0 and gpipe on rank 2. Every rank must run the same script with the same arguments"
    )


def test_a_rank_that_is_gone_ends_this_call_and_all_that_follow() -> None:
    room = Room()
    for rank in room.told:
        room.begin(rank)
    room.hub.lost(1)
    assert room.failures(0)[0].startswith("rank 1 is gone: its process ended without a word")
    assert room.told[0][0]["failure"]["is_final"]
    assert room.told[1] == []
    room.begin(0, epoch=1)
    assert room.failures(0)[1] == room.failures(0)[0]


def test_last_words_come_before_the_end_of_the_connection() -> None:
    room = Room()
    cause = ["ValueError", "no more paper", "Traceback ..."]
    room.hub.hear(1, {"kind": "bye", "text": "rank 1 ended with ValueError", "cause": cause})
    room.hub.lost(1)
    assert room.failures(0) == room.failures(2) == ["rank 1 ended with ValueError"]
    assert room.told[0][0]["failure"]["cause"] == tuple(cause)


def test_a_silent_rank_is_given_up_and_its_connection_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 29)
    room.hub.look_for_silence(30, pause=3)
    room.hub.hear(2, {"kind": "beat", "doing": "at 2F0"})
    assert room.dropped == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 32)
    room.hub.look_for_silence(30, pause=3)
    assert room.dropped == [1]
    assert room.failures(2)[0].startswith("rank 1 is silent: no sign of life for 30 s")
    assert "heartbeat_timeout" in room.failures(2)[0]


def test_a_hub_that_has_slept_itself_does_not_blame_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A laptop that was closed: everybody seems silent, and nobody was heard."""
    room = Room()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    room.hub.look_for_silence(30, pause=3600)
    assert room.dropped == []
    assert all(told == [] for told in room.told.values())


def test_one_rank_that_cannot_be_told_does_not_keep_the_others_from_hearing() -> None:
    room = Room()
    room.deaf.add(1)
    for rank in room.told:
        room.begin(rank)
        room.done(rank)
    assert room.kinds(0) == room.kinds(2) == ["commit"]


def test_a_heartbeat_says_what_the_others_do() -> None:
    room = Room(2)
    room.hub.hear(1, {"kind": "beat", "doing": "at 1F3"})
    room.hub.beat()
    assert room.told[0] == [{"kind": "beat", "doing": {1: "at 1F3"}}]


def test_values_and_files_reach_one_rank_or_all_others() -> None:
    room = Room()
    read, write = os.pipe()
    os.write(write, b"ab")
    room.hub.hear(2, {"kind": "post", "key": "slab", "value": 64, "to": 0}, [read])
    room.hub.hear(1, {"kind": "post", "key": "cuts", "value": [2], "to": None})
    posted = {"kind": "post", "key": "cuts", "value": [2], "source": 1}
    assert room.told[0] == [{"kind": "post", "key": "slab", "value": 64, "source": 2}, posted]
    assert room.told[1] == []
    assert room.told[2] == [posted]
    assert room.files == [b"a"]
    with pytest.raises(OSError, match="Bad file descriptor"):  # the hub keeps none of them
        os.fstat(read)
    os.close(write)


def test_calls_that_all_have_left_behind_are_forgotten() -> None:
    room = Room()
    for epoch in range(200):
        for rank in room.told:
            room.begin(rank, epoch=epoch)
            room.done(rank, epoch=epoch)
    assert len(room.hub._calls) <= 2


# What turns bytes into objects of any kind, or uses something that does.
PICKLING = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib",
    "multiprocessing", "torch.multiprocessing", "torch.load", "torch.save", "torch.package",
    "torch.distributed.rpc", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip


def pickling(source: str) -> list[str]:
    """Return what a file imports, or calls by its name, that pickles."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names += [node.attr, ast.unparse(node)]
    return [name for name in names if name in PICKLING or name.split(".")[0] in PICKLING]


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from torch import load", "import torch\ntorch.load(x)",
     "from multiprocessing.connection import Client", "dist.broadcast_object_list(x)"],
)  # fmt: skip
def test_the_search_for_pickle_finds_it(source: str) -> None:
    assert pickling(source)


def test_nothing_that_runs_a_pipeline_pickles() -> None:
    """What comes from another process is text and bytes; none of it can make this one run code."""
    folder = Path(stageline.__file__).parent / "running"
    found = {path.name: pickling(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    assert len(found) > 30
    assert {name: names for name, names in found.items() if names} == {}
