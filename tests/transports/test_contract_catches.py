"""The contract is tested by breaking what it guards: each of these liars must be caught by the case named with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.testing import Case, InProcessHarness, check_transport, transport_harness
from kvbaton.testing import transport_ending as ending
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction, FenceEnded, TransportEvent
from kvbaton.transports.tcp import tcp_transport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from tests.transports.process_harness import allocated_in

CASES = {case.name: case for case in check_transport.cases}


class LosesAnEnd(TcpTransport):
    def drain(self) -> Sequence[TransportEvent]:
        return [event for event in super().drain() if not (isinstance(event, CopyEnded) and event.job == 7)]


class EndsTwice(TcpTransport):
    def drain(self) -> Sequence[TransportEvent]:
        return [event for event in super().drain() for _ in range(2)]


class ClaimsRest(TcpTransport):
    """Says at once that a cancelled copy is at rest, and lets it run."""

    def cancel(self, job: JobId) -> None:
        self._jobs.post(CopyEnded(job, Reason.CANCELLED))


class FencesNothing(TcpTransport):
    def fence(self, peer: PeerId) -> None:
        self._jobs.post(FenceEnded(peer))


class LeavesTheDoorOpen(TcpTransport):
    """Closes sockets, but the old secret goes on working."""

    def fence(self, peer: PeerId) -> None:
        secret = self._server.keyring.mint(peer)
        super().fence(peer)
        self._server.keyring._secrets[peer] = secret


class HasNoBound(TcpTransport):
    def submit(self, copy: Copy) -> bool:
        self._jobs._open = 0
        return super().submit(copy)


class WritesTooMuch(TcpTransport):
    def submit(self, copy: Copy) -> bool:
        memory = self._memory.get(0)
        if memory is not None and copy.direction is Direction.READ:
            memory[-1] ^= 0xFF
        return super().submit(copy)


class Spins(TcpTransport):
    def register(self, region: int, memory: memoryview) -> None:
        super().register(region, memory)

        def spin() -> None:
            self._loops[0].call(spin)

        self._loops[0].call(spin)


class NeverRings(TcpTransport):
    def set_waker(self, waker: Callable[[], None]) -> None:
        pass


class TakesAnything(TcpTransport):
    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        with contextlib.suppress(ValueError):
            super().connect(peer, endpoint)


CAUGHT = [
    (LosesAnEnd, "every_accepted_copy_ends_exactly_once"),
    (EndsTwice, "every_accepted_copy_ends_exactly_once"),
    (ClaimsRest, "nothing_lands_after_a_cancelled_read_has_come_to_rest"),
    (FencesNothing, "a_fenced_writer_cannot_land_a_byte"),
    (LeavesTheDoorOpen, "a_fenced_writer_cannot_land_a_byte"),
    (LeavesTheDoorOpen, "a_fenced_writer_comes_back_only_with_a_new_endpoint"),
    (HasNoBound, "a_full_queue_says_so_and_loses_nothing"),
    (WritesTooMuch, "scattered_spans_arrive_exactly"),
    (Spins, "an_idle_transport_costs_no_cpu"),
    (NeverRings, "the_waker_is_called_when_there_is_news"),
    (TakesAnything, "a_nonsense_endpoint_is_refused"),
]


@pytest.mark.parametrize(("liar", "name"), CAUGHT, ids=[f"{liar.__name__}-{name}" for liar, name in CAUGHT])
def test_a_broken_transport_is_caught(
    liar: Callable[[PeerId], TcpTransport], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_harness, "DEADLINE_S", 0.5)
    monkeypatch.setattr(transport_harness.Log.wait, "__defaults__", (0.5,))
    monkeypatch.setattr(ending, "DEADLINE_S", 0.5)
    monkeypatch.setattr(ending, "COPIES_MAX", 1500)
    monkeypatch.setattr(ending, "IDLE_S", 0.2)
    regions: list[Region] = []

    case: Case = CASES[name]
    with pytest.raises(AssertionError):
        case(InProcessHarness(liar, allocated_in(regions), tcp_transport.CAPABILITIES))
    for region in regions:
        region.close()
