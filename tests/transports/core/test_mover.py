"""Both movers keep one contract: exact bytes, every span checked before anything is touched, prompt cancellation."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.transports.core import mover as mover_module
from kvbaton.transports.core.mover import NO_WAIT, Mover, NativeMover, PythonMover, choose_mover
from tests.transports.tcp.blocking import tcp_pair

MOVERS: list[Mover] = [PythonMover()]
with contextlib.suppress(ImportError):
    MOVERS.append(NativeMover())
both = pytest.mark.parametrize("mover", MOVERS, ids=lambda mover: type(mover).__name__)
GO = bytearray(1)
SIZE = 4096

BAD_TRIPLES = [
    (-1, 0, 1),
    (0, -1, 1),
    (0, 0, -1),
    (SIZE, 0, 1),
    (0, SIZE, 1),
    (1, 0, SIZE),
    (0, 1, SIZE),
    (2**63 - 1, 0, 1),
    (0, 2**63 - 1, 2**63 - 1),
    (1, 1, 2**63 - 1),
    (-(2**63), 0, 8),
    (0, 0, -(2**63)),
]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


def test_the_extension_is_chosen_where_it_exists_and_python_when_asked() -> None:
    assert choose_mover().native is (len(MOVERS) == 2)
    assert not choose_mover(pure_python=True).native


def test_an_extension_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "CONTRACT", -1)
    assert not choose_mover().native


@settings(deadline=None)  # a busy machine is not a failure
@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 300)), max_size=30),
    st.booleans(),
)
def test_copies_are_exact(rows: list[tuple[int, int, int]], swap: bool) -> None:
    rows = [(local, remote, min(size, SIZE - max(local, remote))) for local, remote, size in rows]
    source = random.Random(1).randbytes(SIZE)
    expected = bytearray(SIZE)
    for local, remote, size in rows:
        to, at = (remote, local) if swap else (local, remote)
        expected[to : to + size] = source[at : at + size]
    spans = array("q", [number for row in rows for number in row])
    for mover in MOVERS:
        target = bytearray(SIZE)
        assert mover.copy_spans(target, memoryview(source), spans, swap, 0, len(rows), GO) == len(rows)
        assert target == expected
        assert mover.check_spans(spans, 3, SIZE, SIZE) == sum(size for *_, size in rows)


@both
def test_only_the_named_rows_are_copied(mover: Mover) -> None:
    target, source = bytearray(4), bytearray(b"abcd")
    spans = array("q", [0, 0, 1, 1, 1, 1, 2, 2, 1, 3, 3, 1])
    assert mover.copy_spans(target, source, spans, False, 1, 2, GO) == 2
    assert target == b"\0bc\0"


@both
@pytest.mark.parametrize("bad", BAD_TRIPLES)
def test_a_bad_span_is_named_and_nothing_is_touched(mover: Mover, bad: tuple[int, int, int]) -> None:
    target, source = bytearray(SIZE), bytearray(b"x" * SIZE)
    spans = array("q", [0, 0, 64, *bad])
    with pytest.raises(ValueError, match="span 1 "):
        mover.copy_spans(target, source, spans, False, 0, 2, GO)
    with pytest.raises(ValueError, match="span 1 "):
        mover.check_spans(spans, 3, SIZE, SIZE)
    assert target == bytes(SIZE)


@both
@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1), (0, 3), (2, 1), (3, 0), (2**62, 2**62)])
def test_rows_that_are_not_there_are_refused(mover: Mover, start: int, count: int) -> None:
    with pytest.raises(ValueError):
        mover.copy_spans(bytearray(9), bytearray(9), array("q", [0, 0, 1] * 2), False, start, count, GO)


@both
def test_tables_and_memory_of_the_wrong_kind_are_refused(mover: Mover) -> None:
    with pytest.raises(ValueError):
        mover.check_spans(array("q", [0, 0]), 3, 9, 9)
    with pytest.raises(ValueError):
        mover.check_spans(array("q", [0, 0]), 1, 9, 9)
    with pytest.raises(ValueError):
        mover.copy_spans(bytearray(9), bytearray(9), array("q", [0, 0, 1]), False, 0, 1, bytearray(2))
    with pytest.raises(BufferError):
        mover.copy_spans(memoryview(bytes(9)), bytearray(9), array("q", [0, 0, 1]), False, 0, 1, GO)


@both
def test_a_sum_of_sizes_cannot_wrap(mover: Mover) -> None:
    with pytest.raises(ValueError):
        mover.check_spans(array("q", [0, 2**62] * 5), 2, 2**62, 0)


@both
def test_a_cancelled_copy_stops_before_the_next_piece(mover: Mover) -> None:
    target = bytearray(4)
    assert mover.copy_spans(target, bytearray(b"abcd"), array("q", [0, 0, 4]), False, 0, 1, bytearray(b"\1")) == 0
    assert target == bytes(4)


@both
def test_a_copy_under_way_is_cancelled_from_another_thread(mover: Mover) -> None:
    size = 4 << 20
    target, source, cancel = bytearray(size), bytearray(b"x" * size), bytearray(1)
    spans = array("q", [0, 0, size] * 100_000)  # 400 GB: a minute, if it were not cancelled
    done: list[int] = []
    thread = threading.Thread(
        target=lambda: done.append(mover.copy_spans(target, source, spans, False, 0, 100_000, cancel))
    )
    thread.start()
    cancel[0] = 1
    thread.join(20)
    assert done and done[0] < 100_000


@both
@pytest.mark.parametrize("width", [2, 3])
def test_spans_cross_a_socket_exactly_whatever_the_room(
    mover: Mover, width: int, sockets: tuple[socket.socket, socket.socket]
) -> None:
    rng = random.Random(width)
    sizes = [rng.choice([0, 1, 7, 300, 5000]) for _ in range(900)]
    source = bytearray(rng.randbytes(sum(sizes)))
    target = bytearray(len(source))
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    order = rng.sample(range(len(sizes)), len(sizes))
    middle = [0] * (width - 2)
    out = array("q", [n for i in order for n in (offsets[i], *middle, sizes[i])])
    place, landed = {True: (0, 0), False: (0, 0)}, 0
    while landed < len(source):
        for sock, memory, sending in ((sockets[0], source, True), (sockets[1], target, False)):
            room = rng.choice([1, 100, 70000])
            try:
                index, skip, moved = mover.stream_spans(
                    sock, memory, out, width, *place[sending], room, sending, NO_WAIT
                )
            except BlockingIOError:
                continue
            assert moved <= room
            place[sending] = index, skip
            landed += moved * (not sending)
    assert target == source


@both
def test_a_socket_without_bytes_or_room_says_so(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    memory, spans = bytearray(1 << 20), array("q", [0, 1 << 20])
    with pytest.raises(BlockingIOError):
        mover.stream_spans(sockets[0], memory, spans, 2, 0, 0, 1 << 20, False, NO_WAIT)
    with pytest.raises(BlockingIOError):
        while True:
            mover.stream_spans(sockets[0], memory, spans, 2, 0, 0, 1 << 20, True, NO_WAIT)
    sockets[1].close()
    with pytest.raises(BrokenPipeError):
        mover.stream_spans(sockets[0], memory, spans, 2, 0, 0, 1 << 20, True, NO_WAIT)


@both
def test_a_mover_may_wait_for_more_but_not_when_others_are_due(
    mover: Mover, sockets: tuple[socket.socket, socket.socket]
) -> None:
    memory, spans = bytearray(8), array("q", [0, 8])
    with select.epoll() as loop:
        fd = os.eventfd(1)
        loop.register(fd, select.EPOLLIN)
        with pytest.raises(BlockingIOError):  # at once: the eventfd is due
            mover.stream_spans(sockets[0], memory, spans, 2, 0, 0, 8, False, (loop.fileno(), 60_000))
        os.eventfd_read(fd)
        sockets[1].send(b"1234")
        thread = threading.Thread(target=lambda: sockets[1].send(b"5678"))
        thread.start()
        place = mover.stream_spans(sockets[0], memory, spans, 2, 0, 0, 8, False, (loop.fileno(), 20_000))
        thread.join()
        assert place == (1, 0, 8) or not mover.native
        assert memory[: place[2]] == b"12345678"[: place[2]]
        if place[2] == 8:
            with pytest.raises(BlockingIOError):  # when the time is over
                mover.stream_spans(sockets[0], memory, spans, 2, 0, 0, 8, False, (loop.fileno(), 1))
        os.close(fd)


@both
def test_the_end_of_a_connection_is_told_even_if_bytes_moved_before(mover: Mover) -> None:
    """The kernel tells it once: after it was swallowed nobody can say whether the peer closed."""
    near, far = tcp_pair()
    far.close()
    memory, spans = bytearray(1), array("q", [0, 1] * SIZE)
    dead = select.poll()
    dead.register(near, 0)
    with near, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while not dead.poll(1):
            mover.stream_spans(near, memory, spans, 2, 0, 0, SIZE, True, NO_WAIT)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "it was swallowed"


@both
def test_the_end_of_a_stream_is_zero_bytes(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[1].close()
    assert mover.stream_spans(sockets[0], bytearray(8), array("q", [0, 8]), 2, 0, 0, 8, False, NO_WAIT) == (0, 0, 0)


@both
@pytest.mark.parametrize("bad", [(-1, 4), (0, -4), (5, 4), (2**63 - 1, 1), (0, 2**63 - 1)])
@pytest.mark.parametrize("sending", [True, False])
def test_a_bad_span_never_reaches_a_socket(
    mover: Mover, bad: tuple[int, int], sending: bool, sockets: tuple[socket.socket, socket.socket]
) -> None:
    memory = bytearray(8)
    sockets[1].send(b"12345678")
    with pytest.raises(ValueError):
        mover.stream_spans(sockets[0], memory, array("q", [0, 2, *bad]), 2, 0, 0, 8, sending, NO_WAIT)
    with pytest.raises(ValueError):
        mover.stream_spans(sockets[0], memory, array("q", [0, 2]), 2, 0, 3, 8, sending, NO_WAIT)
    assert memory == bytes(8)
    with pytest.raises(BlockingIOError):
        sockets[1].recv(8)


@both
@pytest.mark.parametrize("size", [-(2**63), -(2**63) + 1, -1, 0, 7])
@pytest.mark.parametrize("skip", [8, 2**63 - 1])
def test_extreme_sizes_and_places_are_refused_before_anything_is_computed_of_them(
    mover: Mover, size: int, skip: int, sockets: tuple[socket.socket, socket.socket]
) -> None:
    """Built with -ftrapv, the extension died here before: it subtracted one from the other, then looked at both."""
    with pytest.raises(ValueError):
        mover.stream_spans(sockets[0], bytearray(8), array("q", [0, size]), 2, 0, skip, 8, True, NO_WAIT)


@both
def test_a_place_that_cannot_be_is_refused(mover: Mover, sockets: tuple[socket.socket, socket.socket]) -> None:
    for place in ((-1, 0, 8), (0, -1, 8), (0, 0, -8)):
        with pytest.raises(ValueError):
            mover.stream_spans(sockets[0], bytearray(8), array("q", [0, 8]), 2, *place, True, NO_WAIT)
