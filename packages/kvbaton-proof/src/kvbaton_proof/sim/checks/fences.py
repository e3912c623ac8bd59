"""Assigns ends of fences to fences: counted independently of the ledger, by rank and peer (rule 14).

Law: a link is over when as many fences of each rank and peer have ended as had been begun when its own was; the end of
an earlier one says nothing about who was let in since.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvbaton.protocol.events import RankFenced
from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.life import Life

Pair = tuple[int, PeerId]


class Fences:
    """Of one life."""

    def __init__(self, life: Life) -> None:
        self._name = life.character.name
        self._links = life.node.ledger.consumer.links
        self._begun: Counter[Pair] = Counter()
        self._ended: Counter[Pair] = Counter()
        self._under_way: list[tuple[Link, dict[Pair, int]]] = []  # with the number of its fence of each pair
        links, handlers = self._links, life.node.ledger._on_event
        handle, on_fence = handlers[RankFenced], links.on_fence

        def begins(peer: PeerId, now: float) -> None:
            self._note(links.fencing[-1])
            on_fence(peer, now)

        def ends(event: Any, now: float) -> None:
            self._ended[event.rank, event.peer] += 1
            handle(event, now)
            self._check()

        links.on_fence, handlers[RankFenced] = begins, ends

    def _note(self, link: Link) -> None:
        self._begun.update(link.fencing)
        self._under_way.append((link, {pair: self._begun[pair] for pair in link.fencing}))

    def _check(self) -> None:
        waiting = {id(link) for link in self._links.fencing}
        for link, numbers in self._under_way:
            early = [pair for pair, number in numbers.items() if self._ended[pair] < number]
            if id(link) not in waiting and early:
                raise Broken(WRONG, f"{self._name}: {link.worker} is taken for fenced, and {early[:3]} is not over")
        self._under_way = [each for each in self._under_way if id(each[0]) in waiting]
