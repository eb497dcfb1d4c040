"""Records between two processes: in order, none lost, and who sleeps is woken."""

from __future__ import annotations

import errno
import os
import select
import struct
from collections.abc import Iterator

import pytest

from stageline.running.slabs import can_share_memory
from stageline.running.transports.barriers import fenced_by_others
from stageline.running.transports.rings import CAPACITY, Reader, Writer

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not can_share_memory(), reason="needs memory without a name"),
]

NUMBER = struct.Struct("<q")


@pytest.fixture
def ends() -> Iterator[tuple[Writer, Reader]]:
    writer = Writer(NUMBER)
    reader = Reader(NUMBER, writer.files)
    yield writer, reader
    writer.close()
    reader.close()


def taken(reader: Reader) -> int:
    record = reader.next()
    assert record is not None
    (number,) = record
    reader.free(number % CAPACITY)
    return int(number)


def slept(side: Reader | Writer) -> bool:
    """Sleep until the bell rings; return whether it did."""
    return bool(select.select([side.bell], [], [], 20)[0])


def test_records_come_in_order_also_around_the_end(ends: tuple[Writer, Reader]) -> None:
    writer, reader = ends
    got = []
    for start in range(0, 5 * CAPACITY, CAPACITY):
        for number in range(start, start + CAPACITY):
            writer.put(number)
        while reader.has_news:
            got.append(taken(reader))
        assert writer.num_freed == len(got)
    assert got == list(range(5 * CAPACITY))


def test_what_records_tell_of_is_given_back_in_any_order(ends: tuple[Writer, Reader]) -> None:
    writer, reader = ends
    for number in (3, 5, 9):
        writer.put(number)
    assert [reader.next() for _ in range(4)] == [(3,), (5,), (9,), None]
    assert not reader.has_news
    for number in (5, 9):
        reader.free(number)
    assert writer.num_freed == 2
    assert [number for number in (3, 5, 9) if writer.takes_back(number)] == [5, 9]
    assert not writer.takes_back(5)
    reader.free(3)
    assert writer.takes_back(3)


def test_a_reader_who_sleeps_is_called_by_a_writer_who_needs_something_back(
    ends: tuple[Writer, Reader],
) -> None:
    writer, reader = ends
    writer.put(1)
    assert reader.next() == (1,)
    reader.lie_down()
    assert not reader.is_waited_for
    writer.lie_down()
    assert slept(reader)
    assert reader.is_waited_for
    reader.get_up()
    reader.free(1)
    assert slept(writer)
    writer.get_up()
    assert not reader.is_waited_for


def test_nobody_who_is_awake_is_called(ends: tuple[Writer, Reader]) -> None:
    writer, reader = ends
    writer.put(1)
    taken(reader)
    assert select.select([reader.bell, writer.bell], [], [], 0) == ([], [], [])


def test_who_sleeps_is_called_and_who_got_up_is_not(ends: tuple[Writer, Reader]) -> None:
    writer, reader = ends
    reader.lie_down()
    writer.put(1)
    assert slept(reader)
    assert reader.get_up()
    writer.lie_down()
    taken(reader)
    assert slept(writer)
    assert writer.get_up()
    writer.put(2)
    taken(reader)
    assert select.select([reader.bell, writer.bell], [], [], 0) == ([], [], [])


def test_a_side_that_was_called_many_times_is_called_all_the_same(
    ends: tuple[Writer, Reader],
) -> None:
    """A pipe that is full of calls is no error."""
    writer, reader = ends
    reader.lie_down()
    for number in range(1 << 17):
        writer.put(number)
        taken(reader)
    assert reader.get_up()


def test_the_end_of_the_other_side_is_noticed_after_its_last_record() -> None:
    writer = Writer(NUMBER)
    reader = Reader(NUMBER, writer.files)
    reader.lie_down()
    writer.put(7)
    writer.close()
    assert reader.get_up()  # it was called for the record
    assert taken(reader) == 7
    assert not reader.get_up()
    reader.close()


def test_a_ring_that_cannot_be_made_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = len(os.listdir("/proc/self/fd")), os.pipe
    made: list[tuple[int, int]] = []

    def pipe() -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(real())
        return made[0]

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="Too many"):
        Writer(NUMBER)
    assert len(os.listdir("/proc/self/fd")) == before


def _echo(requests: Reader, answers: Writer, count: int) -> bool:
    """Send back what comes, asleep whenever nothing is there; return whether all calls came."""
    for _ in range(count):
        while not requests.has_news:
            requests.lie_down()
            if not requests.has_news and not slept(requests):
                return False
            requests.get_up()
        answers.put(taken(requests))
    return True


@pytest.mark.parametrize("left_to_the_sleeper", [True, False])
def test_no_call_is_lost_between_two_processes_that_sleep_at_every_turn(
    left_to_the_sleeper: bool,
) -> None:
    """If the two looked past each other once, both would sleep until somebody's patience ends."""
    if left_to_the_sleeper and not fenced_by_others():
        pytest.skip("this kernel has no membarrier")
    fences, count = not left_to_the_sleeper, 20_000
    there, back = Writer(NUMBER, fences=fences), Writer(NUMBER, fences=fences)
    requests, answers = (Reader(NUMBER, ring.files, fences=fences) for ring in (there, back))
    child = os.fork()
    if child == 0:
        heard_all = False
        try:
            heard_all = _echo(requests, back, count)
        finally:
            os._exit(0 if heard_all else 1)
    got = []
    for number in range(count):
        there.put(number)
        while not answers.has_news:
            answers.lie_down()
            if not answers.has_news:
                assert slept(answers), f"nobody called for record {number}"
            answers.get_up()
        got.append(taken(answers))
    assert os.waitpid(child, 0)[1] == 0
    assert got == list(range(count))
    for ring in (there, back, requests, answers):
        ring.close()
