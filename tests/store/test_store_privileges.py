"""Whom the shared store answers, by the role of the key that asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Act, Role, may
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_backend import Dial, encode
from kvbaton.store.tcp_server_side import LineServer, StoreServer
from kvbaton.testing.transport_harness import poll


class Port:
    """Frames in a list; what the store says in another."""

    def __init__(self, frames: Sequence[tuple[WorkerId, bytes]]) -> None:
        self.frames = list(frames)
        self.sent: list[WorkerId] = []
        self.woken = False

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        frames, self.frames = self.frames, []
        return frames

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        self.sent.append(worker)
        return True

    def wait(self, timeout_s: float | None) -> None:
        poll(lambda: self.woken, 0.05)

    def wake(self) -> None:
        self.woken = True

    def close(self) -> None: ...


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    backend = MemoryBackend(1 << 20)
    yield backend
    backend.close()


@pytest.mark.parametrize("role", Role)
def test_the_store_answers_workers_and_nobody_else(memory: MemoryBackend, role: Role) -> None:
    member = WorkerId("m")
    port = Port([(member, encode(Dial(1))), (member, encode(Dial(2)))])
    lines = LineServer(memory, "127.0.0.1", value_bytes_max=1 << 20)
    server = StoreServer(port, memory, lines, may_ask=lambda _: may(role, Act.KEEP))
    heard = role in (Role.PREFILL, Role.DECODE, Role.BOTH)
    assert poll(lambda: len(port.sent) + server.counters["forbidden"] == 2, 20)
    assert port.sent == ([member] * 2 if heard else []) and len(lines._invitations) == len(port.sent)
    server.close()
    assert server.counters["forbidden"] == (0 if heard else 2)
