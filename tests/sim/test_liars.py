"""A member that lies: about everything there is, as far as its key lets it, and honest members do not notice.

Rules 25 to 29, and the promises against one valid key (docs/security.md).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.legality import may_say
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import decode, encode
from kvbaton_proof.lies.lie_fields import KINDS, Fields, Seen, all_places, kind_of, shape_of
from kvbaton_proof.sim.cluster import Cluster
from kvbaton_proof.sim.hardship.world_plan import FAULTY_S, draw_honest
from kvbaton_proof.sim.liars.liar_plan import LIARS, SHARE, draw
from kvbaton_proof.sim.liars.sim_liar import role_in, temper_of
from kvbaton_proof.sim.promises import Broken
from kvbaton_proof.sim.run import run_seed
from kvbaton_proof.sim.world.life import BoundedTimers
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.world import World

from .seen_seeds import plan_of

CARD = m.Card(0, 7, "host", {"model": "sim"}, Shape().layout(), ("tcp",))
EXAMPLES: dict[type, m.Message] = {
    m.Hello: m.Hello(1, CARD),
    m.Welcome: m.Welcome(1, CARD, "tcp", (b"1:1",)),
}


def liar_seeds() -> Iterator[int]:
    return (seed for seed in range(10_000) if plan_of(seed).profile == LIARS)


def body_of(message: m.Message) -> list[object]:
    found: list[object] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return found


def example(kind: type) -> list[object]:
    if kind in EXAMPLES:
        return body_of(EXAMPLES[kind])
    return Fields(random.Random(0), Seen()).invented(kind)


def is_read(body: list[object]) -> bool:
    """Whether the codec takes it."""
    try:
        decode(msgspec.msgpack.encode([2, "p0", 1, 1, 1, body]))
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_message_is_lied_about_and_mostly_so_that_it_is_heard(kind: type) -> None:
    fields = Fields(random.Random(f"test {kind.__name__}"), Seen())
    for field in shape_of(kind).fields:
        bodies = [fields.altered(example(kind), field.name) for _ in range(60)]
        assert any(body != example(kind) for body in bodies), field.name
        assert sum(map(is_read, bodies)) >= 10, field.name


def test_numbers_are_taken_to_both_ends_of_their_range_and_beyond() -> None:
    fields = Fields(random.Random("ends"), Seen())
    told = {fields.altered(example(m.Granted), "lease")[3] for _ in range(300)}
    assert {0, (1 << 63) - 1, -1, 1 << 63} <= told
    terms = {fields.altered(example(m.Renewed), "ttl_s")[3] for _ in range(300)}
    assert {0.001, 604_800.0, 1e-300} <= terms


def test_names_of_other_things_are_used_in_the_wrong_place() -> None:
    seen = Seen()
    seen.note(body_of(m.Commit(77, 55)))  # type: ignore[arg-type]
    fields = Fields(random.Random("names"), seen)
    assert any(fields.altered(example(m.Renew), "lease")[1] == 77 for _ in range(40))
    assert any(fields.invented(m.Ack)[2] == 55 for _ in range(5))


def test_an_older_version_lacks_a_field_and_is_left_without() -> None:
    body = example(m.Abandon)[:-1]
    assert Fields(random.Random(0), Seen()).altered(body, "reason") == body
    assert kind_of(body) is m.Abandon


def test_a_liar_with_few_lies_tells_them_in_what_its_key_may_say() -> None:
    for n in range(200):
        for name in ("p0", "d1", "b2"):
            places = temper_of(random.Random(n), role_in(WorkerId(name))).fields
            kinds = {getattr(m, kind) for kind, _ in places if kind != "Envelope"}
            assert all(may_say(role_in(WorkerId(name)), kind) for kind in kinds)


def test_worlds_without_a_liar_are_what_they_were_and_some_have_one() -> None:
    plans = [plan_of(seed) for seed in range(400)]
    assert all(plan == draw_honest(World(seed).rng) for seed, plan in enumerate(plans) if not plan.liars)
    with_one = [plan for plan in plans if plan.liars]
    assert abs(len(with_one) / 400 - SHARE) < 0.06
    for plan in with_one:
        assert len(plan.liars) == 1 and plan.profile == LIARS
        for part in (plan.prefill, plan.decode):
            assert [each for each in part if each.name not in plan.liars]


def test_everything_is_lied_about_and_every_trick_is_tried() -> None:
    told: Counter[tuple[str, str]] = Counter()
    tricks: Counter[str] = Counter()
    for _, seed in zip(range(14), liar_seeds(), strict=False):
        world = World(seed)
        cluster = Cluster(world, draw(world.rng))
        world.run(FAULTY_S)
        told += cluster.liars.told
        tricks += world.faults
    rare = {"Reset", "SourceLost", "RenewRefused", "Stale", "Goodbye", "ClaimRefused", "HelloRefused"}
    left = {place for place in all_places() if not told[place] and place[0] not in rare}
    assert len(left) <= len(all_places()) // 10, left
    assert {
        "lies_told", "lies_omitted", "lies_repeated", "lies_held_back", "lies_replayed", "lies_invented",
        "lies_spoofed", "lies_greeted", "lies_claimed", "lies_about_others", "lies_with_others_tickets", "lies_copied",
    } <= set(tricks)  # fmt: skip


def test_the_promises_hold_for_honest_members_and_the_same_seed_tells_the_same_lies() -> None:
    """More such worlds hold in `make sim`."""
    seed = next(liar_seeds())
    result = run_seed(seed)
    assert result.holds, f"{result.promise}: {result.what}\nkvbaton sim --replay {seed}"
    assert result.faults["lies_told"] and result.delivered > result.handoffs // 3
    assert run_seed(seed).trace_hash == result.trace_hash


def test_timers_that_never_end_at_one_time_are_a_hang() -> None:
    timers = BoundedTimers()
    timers._soonest = -1e9  # what the product's own law forbids
    with pytest.raises(Broken, match="no hang"):
        while True:
            timers.pop_due(1.0)


def test_a_spoofed_name_is_refused_where_bytes_become_messages() -> None:
    world = World(next(liar_seeds()))
    cluster = Cluster(world, draw(world.rng))
    liar, victim, other = sorted(cluster.lives, key=lambda name: name not in cluster.plan.liars)[:3]
    ledger = cluster.lives[victim].node.ledger
    peer = PeerId(other, Incarnation(1))
    ledger.on_frame(liar, encode(peer, Incarnation(0), 0, m.Hello(1, CARD)), 0.0)
    assert ledger.desk.counts["frames_refused.bad_message"] == 1 and not ledger.sessions.by_number
