"""What a ticket is bound to, tried on real nodes over real sockets: content, reader, life, time, and one use each.

The same is tried on the pure ledger, reason by reason, in `tests/protocol/machines/test_producer.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvbaton.api.params import TransferParams
from kvbaton.engines.embedded.http_worker import RefusedError
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX, Ticket, seal, unseal
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.policy import Pair as RouterPair
from kvbaton.router.workers.directory import ListedEngine
from tests.e2e.pair import Pair, pair

pytestmark = pytest.mark.timeout(120)

PROMPT = "The baton is handed over once. "


@contextlib.asynccontextmanager
async def strict(tmp_path: Path) -> AsyncIterator[Pair]:
    """A D that says why a handoff failed instead of computing the prompt itself."""
    short = {"claim_timeout": 5.0, "defer_timeout": 5.0}
    async with pair(tmp_path, p=short, d={**short, "policy": "fail"}) as both:
        yield both


async def refused(both: Pair, prompt: str, params: TransferParams) -> str:
    with pytest.raises(RefusedError) as caught:
        await both.decode(prompt, params)
    return str(caught.value.code)


def changed(both: Pair, params: TransferParams, **changes: object) -> TransferParams:
    """The same ticket with other content, signed with the cluster's own key, as a worker gone bad could."""
    content = unseal(params.ticket or "", [both.key], time.time())
    return msgspec.structs.replace(params, ticket=seal(msgspec.structs.replace(content, **changes), both.key))


CHANGES: tuple[tuple[dict[str, object], Reason | None], ...] = (
    ({"incarnation": Incarnation(5)}, Reason.WRONG_INCARNATION),
    ({"target": WorkerId("d9")}, Reason.TICKET_FORGED),
    ({"source": WorkerId("d0")}, None),
    ({"digest": b"x" * 16}, Reason.CONTENT_MISMATCH),
    ({"handoff": handoff_id(TransferId("9" * 32))}, Reason.UNKNOWN_LEASE),
    ({"expires_unix_s": 1.0}, Reason.TICKET_EXPIRED),
    ({"expires_unix_s": time.time() + 10 * TICKET_LIFE_S_MAX}, Reason.TICKET_FORGED),
    ({"expires_unix_s": float("nan")}, Reason.TICKET_FORGED),
)


async def test_a_ticket_with_other_content_gets_nothing_and_costs_the_genuine_one_nothing(tmp_path: Path) -> None:
    async with strict(tmp_path) as both:
        for number, (changes, expected) in enumerate(CHANGES):
            prompt = f"{number} {PROMPT}"
            params = await both.prefill(prompt)
            code = await refused(both, prompt, changed(both, params, **changes))
            assert expected is None or code == expected, changes
            assert len(await both.decode(prompt, params)) > 0
            await both.at_rest()


OVER = (Reason.CONTENT_MISMATCH, Reason.TICKET_SPENT, Reason.UNKNOWN_LEASE)


async def test_a_ticket_is_for_one_prompt(tmp_path: Path) -> None:
    async with strict(tmp_path) as both:
        params = await both.prefill(PROMPT)
        assert await refused(both, PROMPT + "But not another.", params) == Reason.CONTENT_MISMATCH
        bare = changed(both, params, digest=b"")  # as if it were bound to nothing: P compares with its own
        assert await refused(both, PROMPT + "But not another.", bare) in OVER  # by whoever brought it first
        assert await refused(both, PROMPT, params) in OVER
        await both.at_rest()


async def test_a_ticket_is_good_once(tmp_path: Path) -> None:
    async with strict(tmp_path) as both:
        params = await both.prefill(PROMPT)
        await both.decode(PROMPT, params)
        assert await refused(both, PROMPT, params) in (Reason.TICKET_SPENT, Reason.UNKNOWN_LEASE)
        await both.at_rest()


async def test_a_ticket_of_another_cluster_is_forged(tmp_path: Path) -> None:
    async with strict(tmp_path) as both:
        ticket = seal(Ticket(handoff_id(TransferId("1" * 32)), WorkerId("p0"), time.time() + 60), b"k" * 32)
        assert await refused(both, PROMPT, TransferParams(do_remote_prefill=True, ticket=ticket)) == (
            Reason.TICKET_FORGED
        )


@pytest.mark.parametrize("place", [0, 5, -1])
def test_one_changed_character_spoils_a_ticket(place: int) -> None:
    text = seal(Ticket(handoff_id(TransferId("1" * 32)), WorkerId("p0"), time.time() + 60), b"k" * 32)
    letters = list(text)
    letters[place] = "A" if letters[place] != "A" else "Q"
    with pytest.raises(ProtocolError, match="signature does not verify"):
        unseal("".join(letters), [b"k" * 32], time.time())


def test_the_routers_tickets_name_both_sides_the_life_of_p_and_an_end() -> None:
    p = ListedEngine(WorkerId("p0"), "prefill", "http://127.0.0.1:1", Incarnation(41))
    d = ListedEngine(WorkerId("d0"), "decode", "http://127.0.0.1:2", Incarnation(42))
    minter = TicketMinter(b"k" * 32, 120.0, wall=lambda: 1000.0)
    first, second = (unseal(minter.mint(RouterPair(p, d)), [b"k" * 32], 1000.0) for _ in range(2))
    assert (first.source, first.target, first.incarnation, first.expires_unix_s) == ("p0", "d0", 41, 1120.0)
    assert first.handoff != second.handoff and first.max_readers == 1
    minter.key = b"n" * 32
    assert unseal(minter.mint(RouterPair(p, d)), [b"n" * 32], 1000.0).source == "p0"
