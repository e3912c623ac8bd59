"""Handoffs through the whole stack, without a model: doorway, node, CurveZMQ, claim, copy, commit, report.

The prefill side is a process of its own (`python -m kvbaton_proof.bench.transfer.whole_handoff`) that leases one-block
prompts; this side wants them, one at a time for the latency and many at once for the rate. Every delivered block is
compared.
"""

from __future__ import annotations

import statistics
import sys
import time

import msgspec

from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.transports.catalogue import PlaneSettings, make
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton_proof.bench.kit.handoff_side import HandoffSide, Want, paged_layout
from kvbaton_proof.bench.kit.piped_children import Parent, PipedChild

BLOCKS = 256
PAGE_BYTES = 16 << 10
LAYERS = 2
"""One block is two segments of 16 KiB."""
AT_ONCE = 64
FIRST = 20
"""They greet, dial and map, and are not counted."""


class HandoffResult(msgspec.Struct, frozen=True):
    """One transport's figures."""

    transport: str
    p50_ms: float
    p99_ms: float
    handoffs_per_s: float
    concurrent: int
    handoffs: int
    delivered: int


class Tickets(msgspec.Struct, frozen=True):
    """To P: grant so many."""

    count: int


def _side(name: str, key_directory: str, transport: str, region: Region) -> HandoffSide:
    return HandoffSide(
        name, key_directory, paged_layout(LAYERS, BLOCKS, PAGE_BYTES), BLOCKS,
        lambda me: make(transport, me, PlaneSettings(), [region.view]),
    )  # fmt: skip


def _page(layer: int, block: int) -> slice:
    at = (layer * BLOCKS + block) * PAGE_BYTES
    return slice(at, at + PAGE_BYTES)


def content(block: int) -> bytes:
    """What a block holds: different for each."""
    return bytes([block % 251 + 1]) * PAGE_BYTES


def _block_of(number: int) -> int:
    """Block 0 is nobody's."""
    return 1 + number % (BLOCKS - 1)


def serve(key_directory: str, transport: str) -> None:
    """P: its address, then as many tickets as it is asked for, until its input ends."""
    parent, region = Parent(), allocate(LAYERS * BLOCKS * PAGE_BYTES)
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            region.view[_page(layer, block)] = content(block)
    side = _side("p", key_directory, transport, region)
    parent.answer(side.address)
    for asked in parent.questions(Tickets):
        parent.answer([side.grant([_block_of(number)]) for number in range(asked.count)])
    side.close()
    region.close()


class _Reader:
    """D, with its memory."""

    def __init__(self, key_directory: str, transport: str) -> None:
        self._region = allocate(LAYERS * BLOCKS * PAGE_BYTES)
        self.side = _side("d", key_directory, transport, self._region)
        self.delivered = 0

    def run(self, tickets: list[str], at_once: int) -> list[float]:
        """Each into the block whose source is the one before: no block gets what it should hold by chance."""
        wants = [Want(ticket, [_block_of(number)], [_block_of(number + 1)]) for number, ticket in enumerate(tickets)]
        return self.side.fetch(wants, at_once, self._ended)

    def _ended(self, want: Want, delivered: bool) -> None:
        expected = content(want.source[0])
        pages = (self._region.view[_page(layer, want.target[0])] for layer in range(LAYERS))
        self.delivered += delivered and all(page == expected for page in pages)

    def close(self) -> None:
        self.side.close()
        self._region.close()


def measure(transport: str, latency_handoffs: int = 300, rate_handoffs: int = 3000) -> HandoffResult:
    """One transport: latency alone, rate with many at once."""
    with key_room() as scratch:
        directory = str(scratch / "keys")
        keyring.mint(directory, ["p", "d"])
        with PipedChild("kvbaton_proof.bench.transfer.whole_handoff", directory, transport) as peer:
            reader = _Reader(directory, transport)
            try:
                reader.side.knows("p", peer.hear(tuple[str, str]))
                reader.run(peer.ask(Tickets(FIRST), list[str]), 1)
                alone = sorted(reader.run(peer.ask(Tickets(latency_handoffs), list[str]), 1))
                tickets = peer.ask(Tickets(rate_handoffs), list[str])
                begun = time.monotonic()
                reader.run(tickets, AT_ONCE)
                seconds = time.monotonic() - begun
            finally:
                reader.close()
    return HandoffResult(
        transport, round(statistics.median(alone) * 1000, 3), round(alone[int(len(alone) * 0.99)] * 1000, 3),
        round(rate_handoffs / seconds, 1), AT_ONCE, FIRST + latency_handoffs + rate_handoffs, reader.delivered,
    )  # fmt: skip


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
