"""The listener on real sockets: workers that come, change and fall silent, and everything that is no announcement."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path

import msgspec
import pytest
import zmq

from kvbaton.control.addressing import ControlError
from kvbaton.control.plain import Fleet, PlainListener, PlainSettings
from kvbaton.control.plain import announcement_listener as plain_listener
from kvbaton.control.plain.announcement_listener import MESSAGES_PER_WINDOW_MAX, WINDOW_S
from kvbaton.control.plain.announcements import MESSAGE_BYTES_MAX
from kvbaton.control.plain.announcer import MoriioAnnouncer, MoriioRegistration, p2p_nccl_registration, registration
from kvbaton.observe.codes.entry import FIRST
from tests.control.rig import steady_bind, until

LOOPBACK = "tcp://127.0.0.1:0"
ZMQ = "host:127.0.0.1,handshake:6301,notify:61005"
PATIENT = PlainSettings(suspect_s=60.0, evict_s=120.0)  # nobody falls silent within a test
P0 = registration("P", "127.0.0.1:8100", ZMQ, transfer_mode="READ")
D0 = registration("D", "127.0.0.1:8200", ZMQ, transfer_mode="READ")
W0 = registration("D", "127.0.0.1:8200", ZMQ, transfer_mode="WRITE")


@contextmanager
def listening(bind: str = LOOPBACK, settings: PlainSettings = PATIENT) -> Iterator[PlainListener]:
    listener = PlainListener(bind, settings=settings)
    listener.start()
    try:
        yield listener
    finally:
        assert listener.close()


class Sender:
    """A DEALER that says what the test wants."""

    def __init__(self, endpoint: str, identity: bytes | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def sender(endpoint: str, identity: bytes | None = None) -> Iterator[Sender]:
    opened = Sender(endpoint, identity)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def announcing(endpoint: str, said: MoriioRegistration) -> Iterator[MoriioAnnouncer]:
    announcer = MoriioAnnouncer(endpoint, said, interval_s=0.05)
    announcer.start()
    try:
        yield announcer
    finally:
        assert announcer.stop()


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the listener said; others may speak as well."""
    return [record for record in caplog.records if record.name == plain_listener.__name__]


def listed(listener: PlainListener) -> list[str]:
    return [str(entry.announcement) for entry in listener.workers()]


# --- workers


@pytest.mark.parametrize("bind", [LOOPBACK, "tcp://[::1]:0"])
def test_workers_that_announce_themselves_are_listed(bind: str) -> None:
    with listening(bind) as listener:
        assert listener.workers() == () and not listener.endpoint.endswith(":0")
        with announcing(listener.endpoint, P0), announcing(listener.endpoint, D0):
            until(lambda: listed(listener) == ["D 127.0.0.1:8200", "P 127.0.0.1:8100"])
        assert {entry.announcement.fleet for entry in listener.workers()} == {Fleet.MORIIO_READ}
        assert all(0 < entry.incarnation < 1 << 63 for entry in listener.workers())


def test_p2p_nccls_workers_are_listed_under_the_identity_that_they_choose() -> None:
    said = p2p_nccl_registration("P", "127.0.0.1:8100", "127.0.0.1:21001")
    with listening() as listener, announcing(listener.endpoint, said):
        until(lambda: listed(listener) == ["P 127.0.0.1:8100"])
        assert listener.workers()[0].announcement.fleet is Fleet.P2P_NCCL


def test_the_list_is_the_same_object_until_it_changes() -> None:
    with listening() as listener, sender(listener.endpoint) as worker:
        worker.say(P0.payload)
        until(listener.workers)
        before = listener.workers()
        for _ in range(50):
            worker.say(P0.payload)
        until(lambda: listener.counters["messages"] == 51)
        assert listener.workers() is before and listener.counters["listed"] == 1
        worker.say(D0.payload)
        until(lambda: listener.workers() is not before)


def test_a_worker_that_restarts_replaces_its_entry_in_a_new_life() -> None:
    with listening() as listener, sender(listener.endpoint) as first, sender(listener.endpoint) as second:
        first.say(P0.payload)
        until(listener.workers)
        (old,) = listener.workers()
        elsewhere = ZMQ.replace("6301", "6302")
        second.say(registration("P", "127.0.0.1:8100", elsewhere, transfer_mode="READ").payload)
        until(lambda: listener.workers()[0] != old)
        (new,) = listener.workers()
        assert new.announcement.zmq_address == elsewhere and new.incarnation != old.incarnation


def test_one_that_restarts_is_heard_although_its_old_connection_still_stands() -> None:
    identity = b"127.0.0.1:21001"
    said = p2p_nccl_registration("P", "127.0.0.1:8100", identity.decode())
    later = p2p_nccl_registration("P", "127.0.0.1:8100", "127.0.0.1:21002")
    with listening() as listener, sender(listener.endpoint, identity) as old:
        old.say(said.payload)
        until(listener.workers)
        with sender(listener.endpoint, identity) as new:
            new.say(later.payload)
            until(lambda: listener.workers()[0].announcement.zmq_address == "127.0.0.1:21002")


def test_another_mode_is_refused_for_that_worker_only_and_logged_with_both(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        listening() as listener,
        announcing(listener.endpoint, P0),
        sender(listener.endpoint) as odd,
    ):
        until(listener.workers)
        odd.say(W0.payload)
        until(lambda: said(caplog))  # after it was counted
        assert listed(listener) == ["P 127.0.0.1:8100"] and listener.counters["refused"] == 1
        (record,) = said(caplog)
        assert "D 127.0.0.1:8200" in record.message and "transfer_mode: got WRITE" in record.message
        assert "READ" in record.message


def test_an_empty_delimiter_is_tolerated() -> None:
    with listening() as listener, sender(listener.endpoint) as worker:
        worker.say(b"", P0.payload)
        until(listener.workers)
        assert listener.counters["bad"] == 0


# --- everything else


def test_bad_messages_are_counted_logged_by_field_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        (b"\xc1",),
        (b"",),
        (b"a", P0.payload),
        (*repeat(b"x", 100),),
        (msgspec.msgpack.encode({"type": "P"}),),
        (P0.payload.replace(b"READ", b"read"),),
    ]
    with caplog.at_level(logging.WARNING), listening() as listener, sender(listener.endpoint) as worker:
        for frames in bad:
            worker.say(*frames)
        worker.say(P0.payload)
        until(listener.workers)
        assert listener.counters["bad"] == len(bad) and listener.counters["messages"] == len(bad) + 1
        fields = [record.message.split(": ")[1] for record in said(caplog)]
        assert fields == ["message", "message", "frames", "frames", "http_address", "transfer_mode"]


def test_a_flood_is_heard_in_portions_and_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    count = 8 * MESSAGES_PER_WINDOW_MAX
    began = time.monotonic()
    with (
        caplog.at_level(logging.INFO),
        listening() as listener,
        sender(listener.endpoint) as odd,
        sender(listener.endpoint) as worker,
    ):
        for _ in range(count):
            odd.say(b"\xc1")
        worker.say(P0.payload)
        until(listener.workers)
        until(lambda: listener.counters["bad"] == count)
        assert time.monotonic() - began > 6 * WINDOW_S  # the first window had begun before, and the last has not ended
        skipped = [record for record in said(caplog) if "ignored" in record.message]
        assert FIRST <= len(skipped) <= FIRST + count.bit_length()


def test_a_message_that_is_too_large_costs_its_sender_the_connection_and_nobody_else() -> None:
    with listening() as listener, sender(listener.endpoint) as odd, sender(listener.endpoint) as worker:
        odd.say(b"x" * (MESSAGE_BYTES_MAX + 1))
        worker.say(P0.payload)
        until(listener.workers)

        def heard() -> bool:
            odd.say(D0.payload)  # what goes into the dying connection is lost; libzmq opens another
            return len(listener.workers()) == 2

        until(heard)
        assert listener.counters["bad"] == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 4096,
        b"\xff" * 4096,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32 + b"\x04\xff" + b"\xee" * 300,
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_bytes_that_are_no_zmtp_cost_nothing(garbage: bytes) -> None:
    with listening() as listener:
        host, _, port = listener.endpoint.removeprefix("tcp://").rpartition(":")
        with ExitStack() as stack:
            for _ in range(20):
                rude = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                rude.sendall(garbage)
        with announcing(listener.endpoint, P0):
            until(listener.workers)
        assert listener.is_alive and listener.counters["bad"] == 0


def test_connections_that_say_nothing_or_half_cost_nothing() -> None:
    with listening() as listener, ExitStack() as stack:
        host, _, port = listener.endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(50):
            mute = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            mute.sendall(os.urandom(1))
        with announcing(listener.endpoint, P0):
            until(listener.workers)


def test_nothing_is_ever_sent() -> None:
    with listening() as listener, sender(listener.endpoint) as worker:
        worker.say(P0.payload)
        worker.say(b"\xc1")
        until(lambda: listener.counters["bad"] == 1)
        assert worker.socket.poll(50) == 0


# --- the listener itself


def test_a_port_that_is_taken_is_named_with_the_next_step() -> None:
    with listening() as listener, pytest.raises(ControlError, match=r"in use; .*another port"):
        PlainListener(listener.endpoint)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://192.0.2.1:0", ""])
def test_an_address_that_cannot_be_bound_is_refused(bind: str) -> None:
    with pytest.raises(ControlError, match="plain discovery address"):
        PlainListener(bind)


def test_close_is_quick_idempotent_and_needs_no_start() -> None:
    unused = PlainListener(LOOPBACK)
    assert unused.close() and unused.close()
    listener = PlainListener(steady_bind())
    listener.start()
    with sender(listener.endpoint) as worker:
        worker.say(P0.payload)
        until(listener.workers)
        assert listener.close() and listener.close() and not listener.is_alive
    with listening(listener.endpoint):  # the port is free again
        pass


def thread_switches(listener: PlainListener) -> int:
    """How often the kernel has given the processor to the listener's thread."""
    status = Path(f"/proc/self/task/{listener._thread._thread.native_id}/status").read_text()
    return sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", status)))


def test_waiting_for_nobody_costs_no_processor_time() -> None:
    with listening() as listener:
        until(lambda: listener.is_alive)
        before = thread_switches(listener)
        time.sleep(0.5)
        assert thread_switches(listener) - before < 50, "one that spins, or polls, is switched to all the time"
