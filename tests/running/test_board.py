"""A call is over for all ranks or for none, decided in shared memory or by the hub."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stageline.running.control import Member
from stageline.running.control.agreement import LEAVES, PURPOSE, ROWS, SEED, STEP
from stageline.running.control.board import _FAILED, LONGEST, Board, BoardFiles
from stageline.running.control.failures import Aborted, Failure
from stageline.running.control.hub import Hub
from stageline.running.control.messages import Message
from stageline.running.slabs import can_share_memory
from tests.running.party import members, together

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not can_share_memory(), reason="needs memory without a name"),
]


def _never() -> None:
    raise AssertionError("the lock was not to be had")


@pytest.fixture
def three() -> Iterator[list[Board]]:
    files = BoardFiles.make(3)
    assert files is not None
    boards = [Board(rank, 3, files.copies(), _never) for rank in range(3)]
    files.close()
    yield boards
    for board in boards:
        board.close()


def test_a_call_is_over_when_the_last_rank_is_done(three: list[Board]) -> None:
    for epoch in range(3):
        assert not any(board.begin(epoch, digest=5) for board in three)
        for board, value in zip(three[:2], (b"", b"1.5"), strict=True):
            board.done(epoch, value)
        assert not any(board.is_over(epoch) for board in three)
        three[2].done(epoch, b"x" * LONGEST)
        assert all(board.is_over(epoch) for board in three)
        assert three[0].values() == {1: b"1.5", 2: b"x" * LONGEST}


def test_ranks_that_differ_go_to_the_hub(three: list[Board]) -> None:
    assert not three[0].begin(0, digest=5)
    assert not three[1].begin(0, digest=5)
    assert three[2].begin(0, digest=6)
    for board in three:
        assert board.is_hubs(0)
        board.done(0, b"")
    assert not any(board.is_over(0) for board in three)
    assert not any(board.begin(1, digest=5) for board in three)


def test_a_rank_that_knows_too_little_goes_to_the_hub_and_takes_later_ones_along(
    three: list[Board],
) -> None:
    assert not three[0].begin(0, digest=5)
    assert three[1].begin(0, digest=0)
    assert three[2].begin(0, digest=5)


def test_what_is_over_cannot_fail_and_what_has_failed_is_never_over(three: list[Board]) -> None:
    for board in three:
        board.done(0, b"")
    assert not three[1].withdraw(0)
    three[0].done(1, b"")
    assert three[0].withdraw(1)
    for board in three[1:]:
        board.done(1, b"")
    assert not any(board.is_over(1) for board in three)


def test_a_rank_that_comes_late_does_not_end_a_call_that_has_long_failed(
    three: list[Board],
) -> None:
    """Rank 0 has failed in two calls before the others are done with the first."""
    three[0].done(0, b"")
    assert three[0].withdraw(0)
    assert three[0].withdraw(1)
    for board in three[1:]:
        board.done(0, b"")
    assert not any(board.is_over(0) for board in three)


def test_a_call_that_is_over_is_not_given_to_the_hub(three: list[Board]) -> None:
    for board in three:
        board.done(0, b"")
    three[0].give_to_hub(0)
    assert not three[1].is_hubs(0)


@pytest.mark.parametrize("ends", ["done", "give_to_hub"])
def test_who_sleeps_is_woken_and_the_bell_is_silent_two_calls_later(
    three: list[Board], ends: str
) -> None:
    nothing, _ = pipe = os.pipe()
    for epoch in range(4):
        for board in three:
            board.begin(epoch, digest=5)
        bell = three[0]._bells[epoch % 2]
        assert not select.select([bell], [], [], 0)[0]
        three[0].done(epoch, b"")
        three[1].done(epoch, b"")
        three[0].sleep(epoch, nothing, 0.001)
        if ends == "done":
            three[2].done(epoch, b"")
        else:
            three[2].give_to_hub(epoch)
        assert select.select([bell], [], [], 0)[0]
        three[0].sleep(epoch, nothing, 60)  # returns at once
    for end in pipe:
        os.close(end)


def test_a_rank_sleeps_only_for_a_moment_more_if_a_failed_call_has_silenced_its_bell(
    three: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks but one failed in the next call and silenced the bell; that one slept for 10 s."""
    for board in three:
        board.begin(0, digest=5)
    three[0].done(0, b"")
    three[1].done(0, b"")
    silent, ringing = os.pipe()
    real = select.poll

    def others_go_on() -> Any:
        three[2].done(0, b"")
        three[2].withdraw(1)
        for epoch in (1, 2):
            three[2].begin(epoch, digest=5)
        return real()

    monkeypatch.setattr(select, "poll", others_go_on)
    sleeper = threading.Thread(target=three[0].sleep, args=(0, silent, 300), daemon=True)
    sleeper.start()
    sleeper.join(20)
    is_awake = not sleeper.is_alive()
    os.write(ringing, b"!")
    sleeper.join()
    assert is_awake
    assert three[0].is_over(0)
    os.close(silent)
    os.close(ringing)


def test_a_lock_whose_holder_is_killed_is_free() -> None:
    files = BoardFiles.make(1)
    assert files is not None
    board = Board(0, 1, files.copies(), _never)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        lock = Board(0, 1, files.copies(), _never)._lock
        lock.__enter__()
        os.write(tell, b"!")
        signal.pause()
    os.read(told, 1)
    assert not board._lock._is_taken()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    board.done(0, b"")
    assert board.is_over(0)
    for file in (told, tell):
        os.close(file)
    board.close()
    files.close()


def test_without_files_there_is_no_board_and_none_is_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eventfd(*_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "eventfd", eventfd)
    assert BoardFiles.make(2) is None
    assert len(os.listdir("/proc/self/fd")) == before


def _outcomes(board: Board, seed: int, calls: int) -> str:
    """Take part in calls, and fail in some; the others see that, as if they had been told."""
    chance = random.Random(seed)
    told, deadline = "", time.monotonic() + 20
    for epoch in range(calls):
        board.begin(epoch, digest=1)
        for _ in range(chance.randrange(200)):
            pass
        board.done(epoch, b"")
        if chance.random() < 0.3:
            told += "-" if board.withdraw(epoch) else "+"
            continue
        while not board.is_over(epoch) and board._words[_FAILED] <= epoch:
            assert time.monotonic() < deadline, "a call has no end"
            os.sched_yield()
        told += "-" if board.withdraw(epoch) else "+"
    return told


def test_ranks_never_differ_in_whether_a_call_is_over() -> None:
    """Processes that fail at the worst of moments, thousands of times."""
    files, calls = BoardFiles.make(2), 4000
    assert files is not None
    ends = []
    for rank in range(2):
        mine, theirs = os.pipe()
        if os.fork() == 0:
            outcomes = "no end"
            try:
                outcomes = _outcomes(Board(rank, 2, files.copies(), _never), rank, calls)
            finally:
                os.write(theirs, outcomes.encode())
                os._exit(0)
        os.close(theirs)
        ends.append(mine)
    told = [os.read(end, 2 * calls).decode() for end in ends]
    for end in ends:
        os.wait()
        os.close(end)
    files.close()
    assert told[0] == told[1]
    assert len(told[0]) == calls
    assert set(told[0]) == {"+", "-"}


FACTS = {PURPOSE: "a training step", SEED: 1, STEP: 0, ROWS: 8, LEAVES: {"args[0]": "float32 (8,)"}}


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of messages that the hub hears."""
    kinds: list[str] = []
    real = Hub.hear

    def hear(hub: Hub, rank: int, message: Message, files: Any = ()) -> None:
        if message["kind"] != "beat":
            kinds.append(message["kind"])
        real(hub, rank, message, files)

    monkeypatch.setattr(Hub, "hear", hear)
    return kinds


def test_ranks_that_agree_tell_the_hub_nothing(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    def call(member: Member) -> dict[int, Any]:
        member.begin(FACTS)
        return member.finish([member.rank] if member.rank else None)

    with members(monkeypatch, 3) as joined:
        assert together(3, lambda rank: call(joined[rank])) == [{1: [1], 2: [2]}] * 3
        assert heard == []


def test_a_long_value_goes_by_the_hub(monkeypatch: pytest.MonkeyPatch, heard: list[str]) -> None:
    long = ["x" * LONGEST]

    def call(member: Member) -> dict[int, Any]:
        member.begin(FACTS)
        return member.finish(long if member.rank == 1 else None)

    with members(monkeypatch, 3) as joined:
        assert together(3, lambda rank: call(joined[rank])) == [{1: long}] * 3
        assert heard.count("done") == 3


def test_a_rank_without_a_batch_is_told_its_rows_by_one_that_is_long_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a forward-only call rank 0 may be asleep at its end before rank 1 has begun."""

    def call(member: Member) -> int:
        if member.rank == 0:
            member.begin(FACTS)
            member.finish()
            return 8
        time.sleep(0.2)
        member.begin({PURPOSE: FACTS[PURPOSE], SEED: 1, STEP: 0, ROWS: None})
        rows = member.agreed_rows()
        member.finish()
        return rows

    with members(monkeypatch, 2) as joined:
        assert together(2, lambda rank: call(joined[rank])) == [8, 8]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_at_different_calls_hear_of_it_while_they_work(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    def call(member: Member) -> str:
        purpose = ("a training step", "an evaluation step")[member.rank]
        if member.rank == late:
            time.sleep(0.1)
        member.begin({**FACTS, PURPOSE: purpose})
        failure = member.await_failure(10)
        return "" if failure is None else failure.text

    with members(monkeypatch, 2) as joined:
        first, second = together(2, lambda rank: call(joined[rank]))
    assert first == second
    assert first.startswith("rank 1 is at an evaluation step, rank 0 at a training step")


def test_a_rank_that_fails_wakes_those_who_wait_for_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(member: Member) -> str:
        member.begin(FACTS)
        if member.rank == 1:
            time.sleep(0.1)
            member.fail(Failure(1, member.epoch, "rank 1 has failed"))
            assert not member.is_committed(10)
        else:
            with pytest.raises(Aborted):
                member.finish()
        failure = member.await_failure(10)
        return "" if failure is None else failure.text

    with members(monkeypatch, 3) as joined:
        assert together(3, lambda rank: call(joined[rank])) == ["rank 1 has failed"] * 3


def test_who_fails_after_the_end_is_told_that_it_is_too_late(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    """As an interrupt does that comes between the last word of a call and its return."""

    def call(member: Member) -> bool:
        member.begin(FACTS)
        member.finish()
        member.fail(Failure(member.rank, member.epoch, "interrupted"))
        return member.is_committed(10)

    with members(monkeypatch, 2) as joined:
        assert together(2, lambda rank: call(joined[rank])) == [True, True]
        assert heard == []
