"""A liar at work: what it sees of memory that is given away, what it never says, and one among real workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.control import keyring
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import (
    HandoffId,
    Incarnation,
    LeaseId,
    PeerId,
    ReservationId,
    TransferId,
    WorkerId,
    handoff_id,
)
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Envelope, decode
from kvbaton.router.flow.kv_params import handover
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction
from kvbaton.transports.tcp.tcp_transport import TcpEndpoint
from kvbaton_proof.chaos.liars import lies, lies_to_places
from kvbaton_proof.chaos.liars.liar_http import ANSWERS, ODD, Door, Question
from kvbaton_proof.chaos.liars.liar_post import Asked, Errand, Member, Post, honest_card
from kvbaton_proof.chaos.liars.liar_reach import CHUNKS
from kvbaton_proof.chaos.liars.lies import Count, Guise
from kvbaton_proof.lies.lie_fields import Fields, Seen
from tests.e2e.cluster import some_prompts
from tests.e2e.pair import Pair

LIE_S = 2.0
PROMPTS = 20
P0 = PeerId(WorkerId("p0"), Incarnation(5))
HANDOFF = handoff_id(TransferId("0" * 32))
DIGEST = b"d" * 16


def _errand(directory: str, members: dict[str, Member], told: Sequence[str] = ()) -> Errand:
    return Errand(directory, "liar", Guise.STORE, "127.0.0.1", members, tuple(told), LIE_S, 1)


# --- memory


class _Plane:
    """A data plane of somebody else, that gives and takes all or nothing."""

    def __init__(self, reason: Reason | None) -> None:
        self._reason = reason
        self._ends: list[CopyEnded] = []
        self.asked: list[Copy] = []

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        pass

    def submit(self, copy: Copy) -> bool:
        self.asked.append(copy)
        self._ends.append(CopyEnded(copy.job, self._reason))
        return True

    def drain(self) -> Sequence[CopyEnded]:
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _posted(tmp_path: Path, plane: Any) -> Iterator[Post]:
    keyring.mint(tmp_path / "keys", ["p0", "liar"])
    post = Post(_errand(str(tmp_path / "keys"), {"p0": Member("prefill", "tcp://127.0.0.1:1")}))
    post.reach.plane.close()
    post.reach.plane = plane
    with contextlib.closing(post):
        yield post


def _endpoint(size: int) -> bytes:
    return msgspec.msgpack.encode(TcpEndpoint(P0, "127.0.0.1", 9, b"s" * 32, {0: size}))


@pytest.mark.parametrize("direction", list(Direction))
def test_memory_that_is_given_away_is_noticed_piece_by_piece(direction: Direction, tmp_path: Path) -> None:
    plane = _Plane(None)
    with _posted(tmp_path, plane) as post:
        post.reach.move_all(P0, (_endpoint(1001),), direction, 1e18)
    assert (post.count.told, post.count.refused, post.count.believed) == (CHUNKS, 0, CHUNKS)
    assert post.count.evidence.startswith("p0 ")
    spans = [(copy.spans[1], copy.spans[2]) for copy in plane.asked]
    assert [at for at, _ in spans] == [sum(size for _, size in spans[:n]) for n in range(CHUNKS)]
    assert sum(size for _, size in spans) == 1001


def test_memory_that_is_refused_is_a_lie_refused(tmp_path: Path) -> None:
    with _posted(tmp_path, _Plane(Reason.BAD_SPAN)) as post:
        post.reach.move_all(P0, (_endpoint(1001), b"no endpoint"), Direction.READ, 1e18)
    assert (post.count.told, post.count.refused, post.count.believed) == (CHUNKS, CHUNKS, 0)


# --- what it never says


class _Listening:
    """A liar's post at which one D comes with everything that a D can say; keeps what it is answered."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.me = PeerId(WorkerId("liar"), Incarnation(3))
        self.errand = _errand("", {"d0": Member("decode", "tcp://127.0.0.1:1", "127.0.0.1:2")})
        self.answers: list[tuple[m.Message, bytes]] = []
        self.fields = Fields(self.rng, Seen())
        self.manner: Any = self.refuse
        self.reach = self

    def card(self, **changes: Any) -> dict[str, Any]:
        honest = honest_card("h")
        return {**{name: getattr(honest, name) for name in honest.__struct_fields__}, **changes}

    def answer(self, asked: Asked, body: bytes) -> None:
        self.answers.append((asked.message, body))

    def endpoint_for(self, peer: PeerId) -> bytes:
        return b"e"

    def refuse(self, _: Asked) -> None:
        pass

    def say(self, *_: object, **__: object) -> None:
        pass

    def move_all(self, *_: object) -> None:
        pass

    def rest(self, _: float) -> None:
        lease, attempt, reservation = LeaseId(77), 4, ReservationId(6)
        for message in (
            m.Hello(1, honest_card("d")),
            m.Joined((b"x",)),
            m.Claim(HandoffId(HANDOFF), attempt, "t", DIGEST, False),
            m.Renew(lease, attempt, (0,), False),
            m.Commit(lease, attempt),
            m.Offer(lease, attempt, reservation, 0, (b"\1\0\0\0",), DIGEST),
            m.Revoke(lease, attempt, reservation),
        ):
            envelope = Envelope(2, WorkerId("d0"), Incarnation(9), self.me.incarnation, 1, msgspec.Raw(b""))
            self.manner(Asked(WorkerId("d0"), envelope, message))


@pytest.mark.parametrize("name", [lie.name for lie in lies.LIES if lie.to == ("decode",)])
@pytest.mark.parametrize("seed", range(6))
def test_no_handoff_with_a_liar_comes_to_its_end(name: str, seed: int, tmp_path: Path) -> None:
    """Else a wrong answer could be of the liar's own KV, which nobody promises to notice."""
    post, door = _Listening(seed), Door("127.0.0.1", P0, b"k" * 32, random.Random(seed))
    with contextlib.closing(door):
        lies_to_places.TELLINGS[name](post, door, "d0", time.monotonic() + 0.05)  # type: ignore[arg-type]
    assert post.manner == post.refuse
    assert post.answers
    for asked, body in post.answers:
        try:
            said = decode(msgspec.msgpack.encode([2, "liar", 3, 9, 1, msgspec.Raw(body)]))[1]
        except ProtocolError:
            continue
        assert not (isinstance(said, m.Committed) and isinstance(asked, m.Commit))
        assert not (isinstance(said, m.Written) and said.digest == DIGEST)
        assert not (isinstance(said, m.Stale) and said.good)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_no_answer_over_http_holds_kv_that_anybody_but_the_liar_has(name: str) -> None:
    """As a P its ticket leads to the liar; as a D it says nothing that could be an answer."""
    door = Door("127.0.0.1", P0, b"k" * 32, random.Random(2))

    async def first() -> bytes:
        async with asyncio.timeout(20.0):
            async for piece in ANSWERS[name](door, Question("prompt", "", "", 0.0)):
                return piece
        return b""

    with contextlib.closing(door):
        if name in ("hold", "hang-up"):
            return
        told = asyncio.run(first())
    if name in ("comments", "drip", "huge", "refuse"):
        assert b"choices" not in told
    elif name == "come-to-me":
        found = handover(told.partition(b"\r\n\r\n")[2])
        assert found is not None and found[1].ticket
    assert not any(b"choices" in each for each in ODD)


# --- among real workers


def test_real_workers_believe_no_liar_and_answer_as_before(tmp_path: Path) -> None:
    directory = str(tmp_path / "keys")
    keyring.mint(directory, ["p0", "d0", "liar"])
    prompts = some_prompts(PROMPTS, "lies")
    right = reference_answers(prompts, 4)
    workers = [
        EmbeddedWorker(
            WorkerOptions(name=name, role=role, keys=directory, registry="tcp://127.0.0.1:1", transport="tcp"),  # type: ignore[arg-type]
            keyring.load(directory, name),
        )
        for name, role in (("p0", "prefill"), ("d0", "decode"))
    ]
    p, d = workers
    members = {
        "p0": Member("prefill", p.node.control.endpoint, "127.0.0.1:1"),
        "d0": Member("decode", d.node.control.endpoint, "127.0.0.1:1"),
    }
    told = ("write-all@d0", "read-all@p0", "forged-tickets@p0", "others-leases@d0")
    words = [sys.executable, "-m", "kvbaton_proof.chaos.liars.liar_main"]
    words.append(msgspec.json.encode(_errand(directory, members, told)).decode())

    async def story() -> bytes:
        for worker in workers:
            worker.start()
        try:
            d.node.know({WorkerId("p0"): (p.node.control.endpoint, "")})
            both = Pair(p, d, keyring.load(directory, "p0").ticket_keys[0])
            lying = asyncio.create_task(asyncio.to_thread(subprocess.run, words, capture_output=True, timeout=60))
            numbers = itertools.count()
            while not lying.done():
                number = next(numbers)
                mode = ("pull", "stream", "push")[number % 3]
                assert await both.answer(prompts[number % PROMPTS], mode, 4) == right[number % PROMPTS]
            done = await lying
            assert done.returncode == 0, done.stderr.decode()
            await both.at_rest()
            return bytes(done.stdout)
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.stop)

    tally = lies.decode(asyncio.run(story()))
    assert p.node.loop.faults == d.node.loop.faults == 0
    assert set(tally.counts) == {text.partition("@")[0] for text in told}
    assert all(count.told and isinstance(count, Count) for count in tally.counts.values())
    assert tally.problems() == []
