"""One end of a benchmark's handoffs: a node over one transport, with a doorway and no engine.

Laws: it plays vLLM's connector as far as a handoff needs it: blocks are given before P's answer where that is one
message away, and a block is used again only when it was dropped. Every wait has a deadline.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbaton.control import keyring as keys
from kvbaton.node.cluster_node import ClusterNode, ClusterSettings, EngineFacts, make_doorway, new_life
from kvbaton.node.doorway import DropBlocks, LoadReport, MatchState
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Rank, Share, places, planes
from kvbaton.protocol.ids import PeerId, RequestId, WorkerId, rank_peer
from kvbaton.protocol.settings import Settings

BLOCK_TOKENS = 16
DEADLINE_S = 30.0


class Want(msgspec.Struct, frozen=True):
    """A prompt to fetch: P's ticket, P's blocks, and those that get them."""

    ticket: str
    source: Sequence[int]
    target: Sequence[int]


Ended = Callable[[Want, bool], None]
"""A handoff has ended, delivered or not; its blocks can be looked at now, and not later."""


def paged_layout(layers: int, blocks: int, page_bytes: int) -> EngineLayout:
    """Layer by layer, each with a page for every block, in one region."""
    cell = Cell("kv", page_bytes // BLOCK_TOKENS)
    group = Group("full", GroupKind.FULL, BLOCK_TOKENS, tuple(map(str, range(layers))), 1, (cell,), "bytes")
    stride = blocks * page_bytes
    cells = places(range(layers), 0, stride, page_bytes)
    share = Share(0, 1, blocks, cells, planes("PHN", (cell,), 1, BLOCK_TOKENS))
    return EngineLayout((group,), (Rank(0, 0, 0, (layers * stride,), (share,)),))


class HandoffSide:
    """`make` makes the transport, with its memory registered."""

    def __init__(
        self, name: str, key_directory: str, layout: EngineLayout, blocks: int, make: Callable[[PeerId], Any]
    ) -> None:
        keyring = keys.load(key_directory, name)
        facts = EngineFacts(me=new_life(name), role="both", blocks=blocks, layout=layout, compat={"model": "none"})
        self._news = threading.Event()
        self._doorway = make_doorway(facts, keyring, ticket_ttl_s=600.0)
        self._doorway.wake_engine = self._news.set
        transport = make(rank_peer(facts.me, 0))
        settings = ClusterSettings(protocol=Settings(lease_s=60.0), records=False)
        transports = [{transport.capabilities.name: transport}]
        self._node = ClusterNode(facts, keyring, transports, self._doorway, settings)
        self.address = self._node.address
        self._node.start()

    def knows(self, name: str, address: tuple[str, str]) -> None:
        self._node.know({WorkerId(name): address})

    def grant(self, blocks: Sequence[int]) -> str:
        """P: a ticket for a prompt that fills these blocks."""
        self._doorway.duties()
        return self._doorway.grant(_digest(blocks), BLOCK_TOKENS * len(blocks), (tuple(blocks),))[0]

    def fetch(self, wants: Sequence[Want], at_once: int = 1, ended: Ended | None = None) -> list[float]:
        """D: whole handoffs, from wanting each to the engine's report, in seconds. RuntimeError if one does not end,
        or fails and nobody counts that.
        """
        todo = list(wants)[::-1]
        under_way: dict[RequestId, _Flight] = {}
        seconds: list[float] = []
        while todo or under_way:
            held = {block for flight in under_way.values() for block in flight.want.target}
            while todo and len(under_way) < at_once and held.isdisjoint(todo[-1].target):
                want, request = todo.pop(), RequestId(secrets.token_hex(8))
                held.update(want.target)
                under_way[request] = _Flight(want, time.perf_counter())
                tokens = BLOCK_TOKENS * len(want.source)
                self._doorway.want(request, want.ticket, _digest(want.source), tokens)
                self._news.set()  # a ticket that is no ticket is known at once
            if not self._news.wait(DEADLINE_S):
                raise RuntimeError(f"{len(under_way)} handoffs did not end within {DEADLINE_S:.0f} s")
            self._news.clear()
            for duty in self._doorway.duties():
                if isinstance(duty, LoadReport):
                    flight = under_way[duty.request]
                    seconds.append(time.perf_counter() - flight.begun)
                    if ended is not None:
                        ended(flight.want, duty.end.delivered)
                    elif not duty.end.delivered:
                        raise RuntimeError(f"a handoff failed: {duty.end}")
                elif isinstance(duty, DropBlocks):
                    under_way.pop(duty.request, None)
            for request, flight in under_way.items():
                self._allocate(request, flight)
        return seconds

    def _allocate(self, request: RequestId, flight: _Flight) -> None:
        if flight.is_allocated:
            return
        match = self._doorway.match(request)
        if match.state is MatchState.FOUND or (match.state is MatchState.NOT_YET and match.computed):
            flight.is_allocated = True
            self._doorway.allocated(request, (tuple(flight.want.target),), 0)
        elif match.state is MatchState.FAILED:
            raise RuntimeError(f"a handoff failed before it began: {match}")

    def close(self) -> None:
        self._node.stop()


class _Flight:
    """A handoff that has not ended."""

    def __init__(self, want: Want, begun: float) -> None:
        self.want = want
        self.begun = begun
        self.is_allocated = False


def _digest(blocks: Sequence[int]) -> bytes:
    return len(blocks).to_bytes(8, "little") + blocks[0].to_bytes(8, "little")
