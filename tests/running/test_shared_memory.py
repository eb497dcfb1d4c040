"""Packets in shared memory: exact, whatever their kind and size, and with little memory too."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stageline.errors import PipeError
from stageline.running.boundary import Packet, leave
from stageline.running.control.member import Member
from stageline.running.slabs import SMALLEST, can_share_memory
from stageline.running.transports.base import Edge, Endpoint
from stageline.running.transports.channels import RECORD
from stageline.running.transports.outgoing import Outgoing
from stageline.running.transports.packing import Place
from stageline.running.transports.rings import _FREED, Reader
from tests.running.party import Memory, SharedParty, shared_party
from tests.running.scenarios import (
    SCENARIOS,
    a_send_does_not_wait_for_its_receiver,
    edge,
    many_packets_through_a_window,
)

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="this system has no /dev/shm")


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedParty]:
    with shared_party(monkeypatch) as party:
        yield party


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def there(value: Any, party: SharedParty) -> Any:
    """Send a value from rank 0 to rank 1."""

    def story(rank: int, endpoint: Endpoint) -> Any:
        if rank == 0:
            return endpoint.send(edge(0), leave(value)[0])
        return endpoint.receive(edge(0)).wait().value()

    return party.run(story)[1]


def same(got: Tensor, wanted: Tensor) -> bool:
    if wanted.is_conj() or wanted.is_neg():
        wanted = wanted.resolve_conj().resolve_neg()
    alike = got.dtype is wanted.dtype and got.shape == wanted.shape
    if wanted.numel():
        alike = alike and got.data_ptr() % 64 == wanted.data_ptr() % 64
    bits = [one.contiguous().flatten().view(torch.uint8) for one in (got, wanted)]
    return alike and got.stride() == wanted.stride() and torch.equal(*bits)


@pytest.mark.parametrize("name", SCENARIOS)
def test_contract(name: str, party: SharedParty) -> None:
    assert party.run(SCENARIOS[name]) == [[], []]


DTYPES = sorted(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    }.items()
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_arrives(party: SharedParty) -> None:
    """To the bit: the bytes are arbitrary, so that nan, denormals and odd bools are among them."""
    sent = {}
    for name, dtype in DTYPES:
        raw = torch.randint(0, 256, (48 * 16,), dtype=torch.uint8)
        try:
            sent[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype)
        except RuntimeError:  # 1 to 7 bits: torch itself can do nothing with them yet
            assert name.startswith(("int", "uint"))
    assert len(sent) >= 20

    def story(rank: int, endpoint: Endpoint) -> list[str]:
        wrong = []
        for index, (name, tensor) in enumerate(sent.items()):
            if rank == 0:
                endpoint.send(edge(index), leave(tensor)[0])
            elif not same(endpoint.receive(edge(index)).wait().value(), tensor):
                wrong.append(name)
        return wrong

    assert party.run(story) == [[], []]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "a number": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "empty in the middle": lambda: torch.zeros(4, 0, 3).transpose(0, 2),
    "one element": lambda: torch.randn(1, 1, 1),
    "channels_last": lambda: torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "channels_last of one": lambda: torch.randn(1, 1, 5, 7).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "expanded": lambda: torch.randn(5, 1, 3).expand(5, 400, 3),
    "expanded from one": lambda: torch.tensor(1.5).expand(300, 300),
    "misaligned": lambda: torch.randn(4001)[1:],
    "misaligned half": lambda: torch.randn(4001).half()[3:],
    "every other column": lambda: torch.randn(40, 60)[:, ::2],
    "transposed": lambda: torch.randn(300, 200).t(),
    "conjugate": lambda: torch.randn(30, 20, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(30, dtype=torch.complex64).conj().imag,
    "a page and a byte": lambda: torch.zeros(4097, dtype=torch.uint8),
    "three megabytes": lambda: torch.randn(3, 1 << 18),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_layouts_arrive_as_they_were(what: str, party: SharedParty) -> None:
    torch.manual_seed(0)
    tensor = LAYOUTS[what]()
    assert same(there(tensor, party), tensor)


def test_trees_with_holes_and_several_tensors(party: SharedParty) -> None:
    x = torch.randn(7, 3)
    value = {"a": [x, None, {"b": (x.t(), 3, "ü")}], "c": x, "d": torch.zeros(0), "e": 0.1}
    got = there(value, party)
    assert got["a"][1] is None
    assert got["c"] is got["a"][0]
    assert same(got["c"], x)
    assert same(got["a"][2]["b"][0], x.t())
    assert got["a"][2]["b"][1:] == (3, "ü")
    assert (got["d"].shape, got["e"]) == ((0,), 0.1)


def test_a_packet_is_a_copy_that_later_packets_do_not_change(party: SharedParty) -> None:
    """A slab that was read in place, and reused before its backward, gave a wrong gradient."""

    def story(rank: int, endpoint: Endpoint) -> list[float]:
        if rank == 0:
            for index in range(20):
                endpoint.send(edge(index), leave(torch.full((500,), float(index)))[0])
            return []
        kept = [endpoint.receive(edge(index)).wait().value() for index in range(20)]
        return [tensor.sum().item() / 500 for tensor in kept]

    assert party.run(story)[1] == list(range(20))


def test_a_packet_is_read_where_it_lies_and_its_memory_is_free_afterwards(
    party: SharedParty, memory: Memory
) -> None:
    def story(rank: int, endpoint: Endpoint) -> list[float]:
        seen: list[float] = []
        for index in range(50):
            if rank == 0:
                endpoint.send(edge(index), Packet([torch.full((500,), float(index))]))
                endpoint.receive(edge(index, source=1)).wait()
            else:
                receipt = endpoint.receive(edge(index))
                receipt.read(lambda packet: seen.append(float(packet.leaves[0].mean())))
                endpoint.send(edge(index, source=1), Packet([torch.zeros(1)]))
        return seen

    assert party.run(story)[1] == list(range(50))
    assert len(memory.made) <= 4  # two channels, and hardly more


@pytest.mark.parametrize("how", ["another came first", "in pieces", "not plain", "a reader fails"])
def test_a_packet_that_cannot_be_read_in_place_is_read_all_the_same(
    how: str, party: SharedParty, memory: Memory
) -> None:
    if how == "in pieces":
        memory.room = 1
    big = torch.arange(1.0, 60_001.0)
    sent = big.view(200, 300).t() if how == "not plain" else big

    def fail(packet: Packet) -> None:
        raise ValueError("by the reader")

    def story(rank: int, endpoint: Endpoint) -> list[Any]:
        if rank == 0:
            for index in range(3):
                endpoint.send(edge(index), Packet([sent + index]))
            return []
        seen: list[Any] = []
        receipts = [endpoint.receive(edge(index)) for index in range(3)]
        order = [2, 0, 1] if how == "another came first" else [0, 1, 2]
        for index in order:
            if how == "a reader fails" and index == 0:
                with pytest.raises(ValueError, match="by the reader"):
                    receipts[0].read(fail)
            else:
                receipts[index].read(
                    lambda packet: seen.append(packet.leaves[0].double().mean().item())
                )
        return seen

    mean = big.double().mean().item()
    wanted = {"another came first": [2, 0, 1], "a reader fails": [1, 2]}.get(how, [0, 1, 2])
    assert party.run(story)[1] == [mean + index for index in wanted]


def test_a_packet_that_comes_before_its_turn_stays_where_it_lies(
    party: SharedParty, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied out to look behind it: in a V, ranks held a packet more than they needed."""
    copied: list[int] = []
    real = Place.copy

    def copy(place: Place) -> Packet:
        packet = real(place)
        copied.append(int(packet.leaves[0][0]))
        return packet

    monkeypatch.setattr(Place, "copy", copy)

    def story(rank: int, endpoint: Endpoint) -> list[float]:
        order = [1, *range(4, 40), 3, 0, 2]
        if rank == 0:
            for index in range(40):
                endpoint.send(edge(index), Packet([torch.full((500,), float(index))]))
                if index in order[:-3]:
                    endpoint.receive(edge(index, source=1)).wait()
            return []
        sums = []
        for index in order:
            sums.append(endpoint.receive(edge(index)).wait().leaves[0].sum().item() / 500)
            endpoint.send(edge(index, source=1), Packet([torch.full((1,), -1.0)]))
        assert [index for index in copied if index >= 0] == order
        return sums

    assert party.run(story)[1] == [1, *range(4, 40), 3, 0, 2]
    # Three stay, and what passes them is given back: there are two more, and three the other way.
    assert len(memory.made) <= 3 + 2 + 3


def between(source: int, target: int, index: int) -> Edge:
    return Edge(source, target, "F", index, source, target)


# What rank 0 asks for: of which rank, and which packet.
@pytest.mark.parametrize(
    "asked",
    [
        [(1, 5), (2, 0), (2, 1), (2, 2), (2, 3)],
        [(2, 1), (1, 5), (2, 0), (2, 2), (2, 3)],  # a packet stays in its slab
    ],
)
def test_a_rank_that_waits_for_another_makes_room_for_a_third(
    asked: list[tuple[int, int]], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory three ranks waited for each other in a ring, for ever.

    Rank 2 for room towards rank 0, which waited for rank 1, which waited for rank 2.
    """

    def story(rank: int, endpoint: Endpoint) -> list[float]:
        wanted = [asked, [(2, 4)], []][rank]
        sums = [
            endpoint.receive(between(source, rank, index)).wait().leaves[0].mean().item()
            for source, index in wanted
        ]
        sent = [[], [(0, 5)], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4)]][rank]
        for target, index in sent:
            endpoint.send(between(rank, target, index), Packet([torch.full((500,), float(index))]))
        return sums

    with shared_party(monkeypatch, 3) as party:
        for source, target in ((2, 0), (2, 1), (1, 0)):
            party.transports[source].prepare(target)
        memory.room = 4
        got = party.run(story)
    assert got == [[index for _, index in asked], [4], []]


class Late:
    """What a receiver sleeps on: a packet comes just after it has stopped listening."""

    def __init__(self, come: Callable[[], None]) -> None:
        self._come: Callable[[], None] | None = come

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        assert self._come is not None, "it sleeps beside the packet that it waits for"
        come, self._come = self._come, None
        come()
        return []


def test_a_packet_that_comes_while_room_is_made_is_not_overslept(party: SharedParty) -> None:
    """Who made room copied it out of the ring, and then waited for news in the ring."""
    sender, receiver = (transport.open(epoch=0, window=None) for transport in party.transports)
    sender.send(edge(0), Packet([0.0]))
    receiver.receive(edge(0)).wait()

    def come() -> None:
        sender.send(edge(1), Packet([7.0]))
        party.transports[0].outgoing[1].ring.lie_down()  # as if it needed its slab at once

    vars(party.transports[1].incoming[0])["_poll"] = Late(come)
    assert receiver.receive(edge(1)).wait().leaves == [7.0]


@pytest.mark.parametrize("sent", [torch.ones(500), torch.ones(20, 25).t(), torch.ones(501)[1:]])
def test_packets_arrive_on_the_cpu_whatever_the_default_device(
    sent: Tensor, party: SharedParty
) -> None:
    """A tensor to copy into was asked for without a device, and made on the user's default one."""

    def story(rank: int, endpoint: Endpoint) -> str:
        if rank == 0:
            endpoint.send(edge(0), Packet([sent]))
            return ""
        receipt = endpoint.receive(edge(0))
        with torch.device("meta"):
            (tensor,) = receipt.wait().leaves
        return f"{tensor.device} {tensor.sum().item()}"

    assert party.run(story)[1] == "cpu 500.0"


def test_a_packet_that_first_came_in_inference_can_be_trained_on_later(party: SharedParty) -> None:
    def story(rank: int, endpoint: Endpoint) -> list[float]:
        sums = []
        for index in range(2):
            if rank == 0:
                endpoint.send(edge(index), Packet([torch.ones(500)]))
                continue
            with torch.inference_mode(index == 0):
                (tensor,) = endpoint.receive(edge(index)).wait().leaves
            if index == 1:
                (tensor.requires_grad_() * tensor).sum().backward()
                sums.append(tensor.grad.sum().item())
        return sums

    assert party.run(story)[1] == [1000.0]


def test_thousands_of_packets_in_both_directions(party: SharedParty) -> None:
    def story(rank: int, endpoint: Endpoint) -> int:
        right, other = 0, 1 - rank
        for start in range(0, 4000, 8):
            for index in range(start, start + 8):
                endpoint.send(edge(index, source=rank), Packet([torch.tensor([index, rank])]))
            for index in range(start, start + 8):
                got = endpoint.receive(edge(index, source=other)).wait().leaves[0]
                right += got.tolist() == [index, other]
        return right

    assert party.run(story) == [4000, 4000]


def test_more_records_than_a_pipe_holds(party: SharedParty) -> None:
    """The sender goes on when the receiver reads; it must not lose or reorder what waits."""

    def story(rank: int, endpoint: Endpoint) -> list[int]:
        if rank == 0:
            for index in range(2500):
                endpoint.send(edge(index), Packet([index]))
            return []
        return [endpoint.receive(edge(index)).wait().leaves[0] for index in range(2500)]

    assert party.run(story)[1] == list(range(2500))


def test_one_slab_carries_packets_of_changing_kinds(party: SharedParty) -> None:
    """A header is written again only where another kind lies in the slab."""
    kinds = (torch.float32, torch.float64, torch.float32, torch.float32, torch.int16)

    def packet(index: int) -> Packet:
        if index % 7 == 3:
            return leave((torch.full((2,), index), index))[0]
        return Packet([torch.full((1 + index % 2, 3), index, dtype=kinds[index % 5])])

    def story(rank: int, endpoint: Endpoint) -> list[bool]:
        if rank == 0:
            for index in range(60):
                endpoint.send(edge(index), packet(index))
            return []
        got = [endpoint.receive(edge(index)).wait() for index in range(60)]
        return [same(one.leaves[0], packet(i).leaves[0]) for i, one in enumerate(got)]

    assert party.run(story, window=1)[1] == [True] * 60


def sends_first(rank: int, endpoint: Endpoint) -> list[bool]:
    """Both ranks send four megabytes each before either receives: memory must be taken in turns."""
    own = [torch.full((1 << 18,), float(10 * rank + index)) for index in range(4)]
    for index, tensor in enumerate(own):
        endpoint.send(edge(index, source=rank), leave(tensor)[0])
    got = [endpoint.receive(edge(index, source=1 - rank)).wait().value() for index in range(4)]
    return [
        same(one, torch.full((1 << 18,), float(10 * (1 - rank) + i))) for i, one in enumerate(got)
    ]


@pytest.mark.parametrize("room", [None, 2, 3, 4])
def test_two_full_directions_do_not_block_each_other(
    room: int | None, party: SharedParty, memory: Memory
) -> None:
    """With no more memory, and before the first receive, both ranks waited for each other for ever.

    A rank took in only what came through channels that it had already received from.
    """
    for rank in (0, 1):
        party.transports[rank].prepare(1 - rank)
    memory.room = room
    assert party.run(sends_first) == [[True] * 4] * 2
    assert party.run(sends_first, epoch=1) == [[True] * 4] * 2


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("name", ["tensors_arrive_as_they_were", "trees_arrive_as_they_were"])
def test_packets_travel_in_pieces_when_no_more_memory_can_be_had(
    name: str, room: int, party: SharedParty, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.room = room
    with caplog.at_level(logging.WARNING, "stageline"):
        assert party.run(SCENARIOS[name]) == [[], []]
        assert party.run(SCENARIOS[name], epoch=1) == [[], []]
    told = [record.getMessage() for record in caplog.records if "pieces" in record.getMessage()]
    if name.startswith("tensors") and room < 5:
        assert len(told) == 1
        assert "/dev/shm" in told[0]


def test_windows_and_pieces_go_together(party: SharedParty, memory: Memory) -> None:
    memory.room = 1

    def story(rank: int, endpoint: Endpoint) -> list[float]:
        if rank == 0:
            for index in range(6):
                endpoint.send(edge(index), leave(torch.full((50_000,), float(index)))[0])
            return []
        got = [endpoint.receive(edge(index)).wait().value() for index in range(6)]
        return [tensor.sum().item() / 50_000 for tensor in got]

    assert party.run(story, window=2)[1] == list(range(6))
    assert party.run(many_packets_through_a_window, epoch=1, window=2) == [[], []]


def test_a_rank_that_waits_takes_in_no_more_than_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that waited for room towards a slow one took in all that came from the one before.

    So a forward-only run kept as many packets as the last rank was behind, in the middle.
    """
    sent: list[int] = []
    ahead: list[int] = []

    def story(rank: int, endpoint: Endpoint) -> None:
        for index in range(40):
            come = Edge(rank - 1, rank, "F", index, rank - 1, rank)
            if rank == 2 and not ahead:
                time.sleep(0.3)  # all that may come has come
                ahead.append(len(sent))
            packet = endpoint.receive(come).wait() if rank else Packet([torch.zeros(9)])
            if rank < 2:
                endpoint.send(Edge(rank, rank + 1, "F", index, rank, rank + 1), packet)
            if rank == 0:
                sent.append(index)

    with shared_party(monkeypatch, 3) as party:
        party.run(story, window=2)
    assert ahead[0] <= 2 + 1 + 2  # under way, in the hand of rank 1, under way


def test_a_channel_without_any_memory_is_an_error_that_says_what_to_do(
    party: SharedParty, memory: Memory
) -> None:
    """Only channels between neighbours are made ahead; for others there may be no memory left."""
    memory.room = 0
    with pytest.raises(
        PipeError, match=r"rank 0 has no shared memory for its channel to rank 1"
    ) as caught:
        party.transports[0].open(epoch=0, window=None).send(edge(0), Packet([1]))
    assert "/dev/shm" in str(caught.value)
    assert "transport='process-group'" in str(caught.value)


def k_under_way(k: int) -> Callable[[int, Endpoint], None]:
    def story(rank: int, endpoint: Endpoint) -> None:
        if rank == 0:
            for index in range(k):
                endpoint.send(edge(index), leave(torch.zeros(1000))[0])
            endpoint.receive(edge(0, source=1, letter="B")).wait()
            return
        receipts = [endpoint.receive(edge(index)) for index in range(k)]
        for receipt in receipts:
            receipt.wait()
        endpoint.send(edge(0, source=1, letter="B"), Packet([torch.zeros(1)]))

    return story


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_slabs_are_as_many_as_packets_under_way_and_are_used_again(
    party: SharedParty, memory: Memory
) -> None:
    before = open_files()
    for epoch in range(200):
        party.run(k_under_way(5), epoch=epoch)
    assert len(memory.made) <= 5 + 1  # and one for the way back
    assert open_files() <= before + 8  # two pipes for each of two channels, in one process


def test_slabs_of_all_sizes_are_used_again(party: SharedParty, memory: Memory) -> None:
    """Sequence lengths that come and go make no new slabs once each was there."""

    def story(rank: int, endpoint: Endpoint) -> None:
        for index, size in enumerate((100, 30_000, 100_000, 7, 60_000)):
            if rank == 0:
                endpoint.send(edge(index), leave(torch.zeros(size))[0])
                endpoint.receive(edge(index, source=1, letter="B")).wait()
            else:
                endpoint.receive(edge(index)).wait()
                endpoint.send(edge(index, source=1, letter="B"), Packet([torch.zeros(1)]))

    party.run(story)
    made = len(memory.made)
    for epoch in range(1, 30):
        party.run(story, epoch=epoch)
    assert len(memory.made) == made


def test_many_slabs_need_few_files(party: SharedParty, memory: Memory) -> None:
    """Each slab kept a file open on both sides: GPipe with 600 microbatches ran out of them."""
    before = open_files()

    def story(rank: int, endpoint: Endpoint) -> None:
        if rank == 0:
            for index in range(300):
                endpoint.send(edge(index), leave(torch.zeros(10))[0])
            endpoint.send(edge(300), leave(torch.zeros(10))[0])
        else:
            endpoint.receive(edge(300)).wait()

    party.run(story)
    assert open_files() <= before + 10
    assert len(memory.made) <= 128


def test_channels_are_made_anew_after_a_failed_call(party: SharedParty, memory: Memory) -> None:
    before = open_files()
    for epoch in range(5):
        party.run(k_under_way(3), epoch=epoch)
        for transport in party.transports:
            transport.reset()
    while open_files() > before:  # the thread that passes them on closes its own in a moment
        time.sleep(0.01)


def test_nothing_has_a_name(party: SharedParty, memory: Memory) -> None:
    party.run(a_send_does_not_wait_for_its_receiver)
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "/dev/shm/" in line]
    assert mapped
    assert all(line.rstrip().endswith("(deleted)") for line in mapped)
    assert memory.made == [SMALLEST] * len(memory.made)


class Counting:
    """The head of a ring as its reader sees it, which counts late what it has given back."""

    def __init__(self, ring: Reader) -> None:
        self._ring = ring
        self._late: list[int] = []

    def free(self, number: int) -> None:
        self._ring._records[_FREED + number] = 1  # what free() does first
        self._late.append(number)

    def count(self) -> None:
        for number in self._late:
            self._ring.free(number)
            self._ring._records[_FREED + number] = 0  # it was taken back in the meantime
        self._late.clear()


def test_a_slab_that_is_taken_back_before_its_reader_has_counted_it() -> None:
    """Two words say that a slab is free, one after the other; the sender may look in between."""
    posted: list[Any] = []

    class Post:
        rank, num_ranks = 0, 2

        def post(self, key: str, told: Any, *, to: int, files: list[int]) -> None:
            posted.append((told, files))

    def wait(channel: Outgoing, what: str) -> None:
        raise AssertionError("there is room")

    sender = Outgoing(cast(Member, Post()), 1, 0, wait)
    ((_, fences), (*files, slab)) = posted[0]
    reader = Reader(RECORD, files, fences=fences)
    late = Counting(reader)
    for microbatch in range(4):
        sender.send(edge(microbatch), 1, leave(torch.ones(8))[0], None)
        record = reader.next()
        assert record is not None
        assert record[5] == 0  # the same slab every time: nobody has counted it yet
        assert not sender.has_news
        assert not sender.take_back()
        late.free(record[5])
    sender.send(edge(4), 1, leave(torch.ones(8))[0], None)
    late.count()
    assert not sender.has_news
    sender.send(edge(5), 1, leave(torch.ones(8))[0], None)  # the first slab is under way
    assert [reader.next(), reader.next()][1][5] == 1  # type: ignore[index]  # there are two
    sender.close()
    reader.close()
    os.close(slab)
