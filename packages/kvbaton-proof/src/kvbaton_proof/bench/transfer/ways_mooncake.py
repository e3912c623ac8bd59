"""Mooncake's transfer engine driven directly, as fast as we know how, and by kvbaton.

Law: what is measured of Mooncake is Mooncake: over TCP with its connection pool (without it each segment makes a
connection of its own), in batches of as many slices as it can take, addresses ready before the clock starts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.transports.core.transport import Spans
from kvbaton.transports.mooncake.mooncake_engine import SLICES_MAX, address_of, load
from kvbaton.transports.mooncake.mooncake_transport import MooncakeTransport
from kvbaton_proof.bench.transfer.workload import Driven, P, reader_id

DIRECT, DRIVEN = "mooncake", "kvbaton_mooncake"
HOST = "127.0.0.1"
ME = reader_id(DRIVEN)

Batch = tuple[list[int], list[int], list[int]]


class At(msgspec.Struct, frozen=True):
    """Where the source's memory is."""

    address: int
    session: str


def _engine(memory: memoryview) -> Any:
    engine = load().TransferEngine()  # which also turns the pool on
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(address_of(memory), memory.nbytes):
        raise RuntimeError("mooncake cannot start an engine, or register its memory")
    return engine


class Source:
    """P: an engine, and kvbaton's transport."""

    def __init__(self, memory: memoryview) -> None:
        self._at = At(address_of(memory), "")
        self._engine = _engine(memory)
        self._transport = MooncakeTransport(P)
        self._transport.register(0, memory)

    def offer(self) -> dict[str, bytes]:
        at = At(self._at.address, f"{HOST}:{self._engine.get_rpc_port()}")
        return {DIRECT: msgspec.msgpack.encode(at), DRIVEN: self._transport.endpoint(ME)}

    def spin(self, way: str) -> None:
        """Its threads wait for events: nobody has to."""

    def close(self) -> None:
        self._transport.close()


class Reader:
    """D: an engine, and kvbaton's transport."""

    spins = frozenset[str]()
    ways = (DIRECT, DRIVEN)

    def __init__(self, memory: memoryview, offer: dict[str, bytes]) -> None:
        self._address = address_of(memory)
        self._there = msgspec.msgpack.decode(offer[DIRECT], type=At)
        self._engine = _engine(memory)
        self._driven = Driven(DRIVEN, MooncakeTransport(ME), memory, offer[DRIVEN])
        self._batches: list[Batch] = []

    def prepare(self, segment_bytes: int, spans: Spans) -> None:
        self._spans = spans
        here = [self._address + offset for offset in spans[0::3]]
        there = [self._there.address + offset for offset in spans[1::3]]
        sizes = list(spans[2::3])
        starts = range(0, len(here), SLICES_MAX)
        self._batches = [tuple(each[at : at + SLICES_MAX] for each in (here, there, sizes)) for at in starts]  # type: ignore[misc]

    def moved(self, way: str) -> Spans:
        return self._spans

    def run(self, way: str) -> None:
        if way == DRIVEN:
            self._driven.read(self._spans)
            return
        for batch in self._batches:
            code = self._engine.batch_transfer_sync_read(self._there.session, *batch)
            if code:
                raise RuntimeError(f"mooncake did not deliver: code {code}")

    def close(self) -> None:
        self._driven.close()
