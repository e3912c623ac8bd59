"""Engines that joined with a token: handed over to and from, known to minted members, renewed, removed.

Every worker is a real one over real sockets; they share this process, so that a test waits for what it looks at.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbaton.control import key_room, keyring
from kvbaton.control.joining import admission_files as book
from kvbaton.control.joining.join_token import verified
from kvbaton.control.registry import RegistryServer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role
from tests.control.joining.gatehouse import CALM, Gatehouse, gatehouse
from tests.e2e.pair import Pair
from tests.waiting import soon

pytestmark = pytest.mark.timeout(120)

PROMPT = "what one engine has computed, another one goes on with; " * 4
RIGHT = reference_answers([PROMPT], 12)[0]
DEADLINE_S = 40.0


@contextlib.asynccontextmanager
async def worker(
    house: Gatehouse, name: str, role: str, *, joins: bool = True, keys: Path | None = None
) -> AsyncIterator[EmbeddedWorker]:
    """Listed by the registry; `joins`: with a token, not with minted keys."""
    ring = None if joins else keyring.load(keys or house.directory, name)
    member = house.join(house.token(), name, Role(role)) if ring is None else None
    ring = member.keyring if member is not None else ring
    assert ring is not None
    options = WorkerOptions(
        name=name, role=role, keys="-", registry=house.registry.endpoint, transport="tcp", blocks=256
    )  # type: ignore[arg-type]
    made = EmbeddedWorker(options, ring, member=member)
    made.start()
    try:
        made.node.join(("router", house.registry.endpoint), made.node.registration("127.0.0.1:80"))
        await soon(lambda: any(each.registration.worker == name for each in house.registry.workers()))
        yield made
    finally:
        await asyncio.to_thread(made.stop)


def knows(one: EmbeddedWorker, other: EmbeddedWorker) -> bool:
    return one.node.keyring.peers.get(other.node.peer.worker) == other.node.keyring.public and len(one.node.book) > 1


async def acquainted(*workers: EmbeddedWorker) -> None:
    await soon(lambda: all(knows(one, other) for one in workers for other in workers if one is not other))


def pair_of(p: EmbeddedWorker, d: EmbeddedWorker) -> Pair:
    return Pair(p, d, d.node.keyring.ticket_keys[0], (p.node.peer.worker, d.node.peer.worker))


async def delivers(p: EmbeddedWorker, d: EmbeddedWorker, *modes: str) -> None:
    """Right answers, every one of them handed over."""
    for mode in modes:
        before = pair_of(p, d).ends().get("delivered", 0)
        assert await pair_of(p, d).answer(PROMPT, mode) == RIGHT
        assert pair_of(p, d).ends().get("delivered", 0) == before + 1, pair_of(p, d).ends()


async def test_members_that_joined_hand_over_and_outlive_their_registry(tmp_path: Path) -> None:
    with gatehouse(tmp_path / "keys") as house:
        async with (
            worker(house, "p-joined", "prefill") as p,
            worker(house, "d-joined", "decode") as d,
            worker(house, "p0", "prefill", joins=False) as minted,
        ):
            await acquainted(p, d, minted)
            await delivers(p, d, "pull", "stream", "push")
            await delivers(minted, d, "pull", "push")
            assert minted.node.keyring.role_of(WorkerId("d-joined")) is Role.DECODE
            assert minted.node.keyring.role_of(WorkerId("p-joined")) is Role.PREFILL
            house.door.close()
            house.registry.close()
            await delivers(p, d, "pull", "stream")  # nobody is needed by those who know each other
            again = RegistryServer(
                keyring.load(tmp_path / "keys", "router"), house.registry.endpoint, settings=CALM,
                admission=house.admission,
            )  # fmt: skip
            again.start()
            try:
                await soon(lambda: len(again.workers()) == 3)
                await delivers(p, d, "pull")
            finally:
                again.close()


async def test_ticket_keys_reach_members_that_joined_and_removal_ends_their_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "LOOK_S", 0.1)

    keys = tmp_path / "keys"

    def now() -> set[tuple[bytes, ...]]:
        return {keyring.load(keys, "router").ticket_keys}

    with gatehouse(keys) as house:
        async with (
            worker(house, "p-joined", "prefill") as p,
            worker(house, "d-joined", "decode") as d,
            worker(house, "p0", "prefill", joins=False) as minted,
        ):
            await acquainted(p, d, minted)
            await delivers(p, d, "pull")
            old = d.node.keyring.ticket_keys
            for step in (key_room.prepare_tickets, key_room.promote_tickets):
                step(keys)
                await soon(lambda: {each.node.doorway.config.ticket_keys for each in (p, d, minted)} == now())
            assert d.node.keyring.ticket_keys[0] != old[0]
            await delivers(p, d, "pull", "stream")
            await delivers(minted, d, "pull")

            key_room.remove(keys, "d-joined")
            await soon(lambda: not any(WorkerId("d-joined") in each.node.keyring.peers for each in (p, minted)))
            await soon(lambda: [each.registration.worker for each in house.registry.workers()] == ["p-joined", "p0"])
            sessions = p.node.ledger.sessions.by_number
            await soon(lambda: not any(each.peer.worker == "d-joined" for each in sessions.values()))
            heard = p.node.control.counters["frames_in"]
            d.node.loop.call(lambda: d.node.control.send(WorkerId("p-joined"), b"let me in")).result(DEADLINE_S)
            await soon(lambda: p.node.control.counters["refused"])
            assert p.node.control.counters["frames_in"] == heard


async def test_what_a_member_that_joined_gave_is_forgotten_on_other_hosts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By engines that have no key directory, or a copy of it in which nobody has joined."""
    monkeypatch.setattr(keyring, "LOOK_S", 0.1)

    with gatehouse(tmp_path / "keys") as house:
        keyring.add(tmp_path / "keys", "d0:decode")
        elsewhere = shutil.copytree(tmp_path / "keys", tmp_path / "copy")
        async with (
            worker(house, "p-joined", "prefill") as p,
            worker(house, "d-joined", "decode") as d,
            worker(house, "d0", "decode", joins=False, keys=elsewhere) as minted,
        ):
            await soon(lambda: all(knows(each, p) and knows(p, each) for each in (d, minted)))
            await delivers(p, d, "pull")
            await delivers(p, minted, "pull")
            book.revoke_token(tmp_path / "keys", one_token(tmp_path, "p-joined"), with_members=True)
            await soon(lambda: all(each.stats()["cache_resets_total"] == 1 for each in (d, minted)))
            assert all(p.node.keyring.public in each.node.keyring.removed for each in (d, minted))


def one_token(tmp_path: Path, name: str) -> str:
    known = book.joined_file(tmp_path / "keys", name)
    assert known is not None
    return known.token


async def test_a_certificate_is_renewed_while_its_member_pings(tmp_path: Path) -> None:
    with gatehouse(tmp_path / "keys", life_s=3.0) as house:
        async with worker(house, "w-renewed", "both") as one:
            member = one.node._member
            assert member is not None
            first = member.keyring.certificate
            await soon(lambda: member.keyring.certificate != first)
            told = verified(member.keyring.certificate, member.keyring.admission)
            assert told.until > verified(first, member.keyring.admission).until
            await soon(lambda: house.admission.keyring.joined["w-renewed"].until >= told.until)  # also on disk
