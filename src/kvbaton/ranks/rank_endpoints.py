"""Endpoints that a rank creates for peers, for a node that needs them at once.

Laws: the caller waits at most `ENDPOINT_WAIT_S`, and not at all while an earlier request is overdue, so a rank that
stalls costs the node's thread one such wait, not one per peer. An endpoint that arrives late is kept for the next call;
a failure is not: the next call asks again. A response to a request from before a disconnect or fence is dropped: the
secret in it is no longer valid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvbaton.protocol.ids import PeerId
from kvbaton.ranks.rank_carrying import Arrival
from kvbaton.ranks.rank_messages import Minted, MintFailed

ENDPOINT_WAIT_S = 0.5


class Endpoints:
    """The endpoints of one transport. `get` and `forget` by the node's thread, `take` by the link's."""

    def __init__(self, whose: str, ask: Callable[[int, PeerId], None], came: Arrival) -> None:
        self._whose = whose
        self._ask = ask
        self._came = came
        self._numbers = itertools.count(1)
        self._asked: dict[PeerId, int] = {}
        self._answers: dict[PeerId, Minted | MintFailed] = {}
        self._awaited: PeerId | None = None

    def get(self, peer: PeerId) -> bytes:
        """TimeoutError: not yet; RuntimeError: the rank could not."""
        with self._came:
            patient = not self._asked
            if peer not in self._answers and peer not in self._asked:
                number = next(self._numbers)
                self._ask(number, peer)
                self._asked[peer] = number
            self._awaited = peer
            self._came.wait_for(lambda: peer in self._answers, ENDPOINT_WAIT_S if patient else 0)
            self._awaited = None
            answer = self._answers.get(peer)
            if isinstance(answer, Minted):
                return answer.endpoint
            if answer is None:
                raise TimeoutError(f"{self._whose} has not created an endpoint for {peer} yet; try again")
            del self._answers[peer]
        raise RuntimeError(f"{self._whose} could not create an endpoint for {peer}: {answer.detail}")

    def forget(self, peer: PeerId) -> None:
        with self._came:
            self._asked.pop(peer, None)
            self._answers.pop(peer, None)

    def take(self, answer: Minted | MintFailed) -> None:
        with self._came:
            for peer, number in self._asked.items():
                if number == answer.ask:
                    del self._asked[peer]
                    if isinstance(answer, Minted) or peer == self._awaited:
                        self._answers[peer] = answer
                        self._came.notify_all()
                    return
