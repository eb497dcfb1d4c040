"""Messages over a socket: whole, in order, with the files that belong to them, or EOFError."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stageline.running.control.messages import Connection, Message


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = (Connection(sock) for sock in socket.socketpair(socket.AF_UNIX))
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    """Somebody who writes what bytes he likes, and a connection that listens."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection(theirs)
    yield ours, connection
    ours.close()
    connection.close()


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_that_comes_byte_by_byte_is_one_message(
    raw: tuple[socket.socket, Connection],
) -> None:
    sock, connection = raw
    data = framed(json.dumps({"kind": "done", "epoch": 7}).encode())
    got = []
    for byte in data:
        sock.send(bytes([byte]))
        got += connection.receive()
    assert got == [({"kind": "done", "epoch": 7}, [])]


def test_messages_that_come_at_once_are_told_apart(
    raw: tuple[socket.socket, Connection],
) -> None:
    sock, connection = raw
    whole = b"".join(framed(json.dumps({"n": n}).encode()) for n in range(5))
    sock.send(whole[:-3])
    assert [message["n"] for message, _ in connection.receive()] == [0, 1, 2, 3]
    sock.send(whole[-3:])
    assert connection.receive() == [({"n": 4}, [])]


def test_what_comes_with_the_first_message_stays_for_the_next_call(
    pair: tuple[Connection, Connection],
) -> None:
    ours, theirs = pair
    for n in range(3):
        ours.send({"n": n})
    assert theirs.receive_one() == {"n": 0}
    assert theirs.has_more
    assert theirs.receive() == [({"n": 1}, []), ({"n": 2}, [])]
    assert not theirs.has_more


def test_a_message_larger_than_any_buffer(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    text = "ü" * 3_000_000
    sender = threading.Thread(target=ours.send, args=({"text": text},))
    sender.start()
    assert theirs.receive_one() == {"text": text}
    sender.join()


def test_messages_of_several_threads_do_not_mix(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair

    def speak(who: int) -> None:
        for n in range(40):
            ours.send({"who": who, "n": n, "pad": "x" * 9000})

    senders = [threading.Thread(target=speak, args=(who,)) for who in range(4)]
    for sender in senders:
        sender.start()
    got: list[Message] = []
    while len(got) < 160:
        got += [message for message, _ in theirs.receive()]
    for sender in senders:
        sender.join()
    for who in range(4):
        assert [message["n"] for message in got if message["who"] == who] == list(range(40))


def test_who_has_read_all_may_leave_before_the_sender_is_told_so(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that failed at once after joining ended the job of rank 0 with a broken pipe."""
    ours, theirs = pair
    send = socket.send_fds

    def sent_and_read(*args: Any) -> int:
        count = send(*args)
        theirs.close()
        return count

    monkeypatch.setattr(socket, "send_fds", sent_and_read)
    with open(os.devnull) as file:
        ours.send({"kind": "ready"}, [file.fileno()])


def test_files_come_with_their_message(pair: tuple[Connection, Connection]) -> None:
    """Messages with two files, none, and one: each has its own, and they can be read."""
    ours, theirs = pair
    ends = [os.pipe() for _ in range(3)]
    ours.send({"n": 0}, [ends[0][0], ends[1][0]])
    ours.send({"n": 1})
    ours.send({"n": 2}, [ends[2][0]])
    got: list[tuple[Message, list[int]]] = []
    while len(got) < 3:
        got += theirs.receive()
    assert [(message, len(files)) for message, files in got] == [
        ({"n": 0}, 2),
        ({"n": 1}, 0),
        ({"n": 2}, 1),
    ]
    received = [file for _, files in got for file in files]
    for number, (read, write) in enumerate(ends):
        os.write(write, bytes([number]))
        assert os.read(received[number], 1) == bytes([number])
        for file in (read, write, received[number]):
            os.close(file)


def test_a_file_comes_with_a_message_that_is_larger_than_the_buffer(
    pair: tuple[Connection, Connection],
) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    message = {"text": "x" * 2_000_000}
    sender = threading.Thread(target=ours.send, args=(message, [read]))
    sender.start()
    got: list[tuple[Message, list[int]]] = []
    while not got:
        got = theirs.receive()
    sender.join()
    assert got[0][0] == message
    for file in (read, write, *got[0][1]):
        os.close(file)


GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a length beyond all measure": struct.pack(">I", (1 << 31) + 5) + b"x",
    "no JSON": framed(b"{'kind': 'done'}"),
    "no text": framed(b"\xff\xfe\x00"),
    "nothing": framed(b""),
    "a list": framed(b"[]"),
    "a number": framed(b"7"),
    "a text": framed(b'"files"'),
    "null": framed(b"null"),
    "too deep": framed(b"[" * 100_000),
    "files that did not come": framed(b'{"kind": "post", "files": 3}'),
    "a number of files that is none": framed(b'{"kind": "post", "files": "x"}'),
    "a negative number of files": framed(b'{"kind": "post", "files": -1}'),
    "a fraction of a file": framed(b'{"kind": "post", "files": 0.5}'),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_no_peer_would_say_ends_the_connection(
    what: str, raw: tuple[socket.socket, Connection]
) -> None:
    """Anything else than EOFError would end the thread that listens, and the whole job with it."""
    sock, connection = raw
    sock.sendall(GARBAGE[what])
    with pytest.raises(EOFError):
        connection.receive_one()


def test_a_closed_connection_is_an_end(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    ours.send({"n": 0})
    ours.close()
    assert theirs.receive() == [({"n": 0}, [])]
    with pytest.raises(EOFError, match="was closed"):
        theirs.receive()


def test_a_connection_that_was_reset_is_an_end() -> None:
    """As a router or a killed process on another host ends it: not with a FIN but with a RST."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    connection = Connection(accepted)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    with pytest.raises(EOFError):
        connection.receive()
    connection.close()
    server.close()


def test_a_wait_with_a_limit_is_not_taken_for_an_end(pair: tuple[Connection, Connection]) -> None:
    ours, _ = pair
    ours.sock.settimeout(0.01)
    with pytest.raises(TimeoutError):
        ours.receive()


@pytest.mark.parametrize("is_whole", [True, False])
def test_files_that_nobody_took_are_closed_with_the_connection(is_whole: bool) -> None:
    """They stayed open for good: those of a message never looked at, and of one cut off."""
    before = open_files()
    sock, theirs = socket.socketpair(socket.AF_UNIX)
    connection = Connection(theirs)
    read, write = os.pipe()
    second = framed(b'{"n": 1, "files": 2}')
    socket.send_fds(sock, [framed(b'{"n": 0}') + second[: None if is_whole else -3]], [read, write])
    assert connection.receive_one() == {"n": 0}
    assert connection.has_more is is_whole
    connection.close()
    for file in (read, write):
        os.close(file)
    sock.close()
    assert open_files() == before


def test_a_stranger_is_not_listened_to_for_long(raw: tuple[socket.socket, Connection]) -> None:
    """Who has not proved himself could have filled this process's memory, a gigabyte at a time."""
    sock, connection = raw
    connection.longest = 100
    sock.sendall(struct.pack(">I", 101))
    with pytest.raises(EOFError, match="a message of 101 bytes was announced"):
        connection.receive()


def test_a_forked_child_does_not_keep_the_connection_of_a_dead_process_open(
    pair: tuple[Connection, Connection],
) -> None:
    """Workers of a DataLoader are forked, and live on for seconds after kill -9 of their rank.

    They had its connection open, so that the end of the rank was noticed only with theirs.
    """
    ours, theirs = pair
    waits, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    os.close(ours.sock.detach())  # as the end of the process does it, without a farewell
    theirs.sock.settimeout(20)
    with pytest.raises(EOFError):
        theirs.receive()
    os.close(go_on)
    os.waitpid(child, 0)
