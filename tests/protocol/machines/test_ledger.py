"""The one place where handoffs are decided: nothing that comes in raises out or grows without bound (promise 4)."""

from __future__ import annotations

import math
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pair import Make, Pair

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import DropHold, Report, Send, Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, ReservationId, WorkerId
from kvbaton.protocol.machines import inbound
from kvbaton.protocol.machines import ledger as ledger_module
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import encode
from kvbaton.protocol.wire.messages import Versions


def greeting(
    pair: Pair, kind: int, source: str, target: str, nonce: int, card: object, *, to: int | None = None
) -> None:
    """A Hello (1) or a Welcome (2) with anything for a card."""
    me, them = pair.parties[WorkerId(source)].me, pair.parties[WorkerId(target)]
    body = (kind, nonce, card) if kind == 1 else (kind, nonce, card, "tcp", (b"1",))
    frame = msgspec.msgpack.encode((2, me.worker, me.incarnation, them.me.incarnation if to is None else to, 1, body))
    them.receive(me.worker, frame)
    pair.settle()


class TestFrames:
    def test_a_greeter_whose_card_cannot_be_read_is_told_so(self, pair: Pair) -> None:
        card = msgspec.to_builtins(pair.d.ledger.desk.identity.card())
        card[4]["ranks"] *= 300
        greeting(pair, 1, "d", "p", 7, card)
        (refused,) = pair.said(m.HelloRefused)
        assert (refused.nonce, refused.reason) == (7, Reason.BAD_MESSAGE)
        assert refused.detail.startswith("card: Expected `array` of length <= 256")
        assert pair.p.counts["frames_refused.bad_message"] == 1

    def test_a_source_whose_card_cannot_be_read_fails_the_greeting_at_once(self, pair: Pair) -> None:
        pair.lose(m.Welcome, times=99)
        load = pair.pull()
        greeting(pair, 2, "p", "d", 1, ["no card"])
        assert load.failed is not None and load.failed.reason is Reason.BAD_MESSAGE
        assert load.failed.detail.startswith("card: ")

    def test_a_card_that_nobody_asked_for_is_not_read(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ledger_module, "unfolded", None)  # whoever calls it fails
        greeting(pair, 2, "p", "d", 1, ["no card"])
        greeting(pair, 2, "p", "d", 1, ["no card"], to=99)
        assert pair.d.counts["late.welcome"] == 1 == pair.d.counts["late.incarnation"]

    def test_a_frame_that_cannot_be_read_is_counted_and_dropped(self, pair: Pair) -> None:
        pair.p.receive(pair.d.name, b"garbage")
        assert pair.p.counts["frames_refused.bad_message"] == 1 and not pair.log

    def test_a_worker_speaks_only_for_itself(self, pair: Pair) -> None:
        """Promise 5: the control plane says who it is; the envelope must agree."""
        card = pair.d.ledger.desk.identity.card()
        frame = encode(PeerId(WorkerId("d"), Incarnation(1)), Incarnation(0), 0, m.Hello(1, card))
        pair.p.receive(WorkerId("e"), frame)
        assert pair.p.counts["frames_refused.bad_message"] == 1 and not pair.said(m.Welcome)

    def test_a_frame_of_another_version_is_counted_as_such(self, pair: Pair) -> None:
        frame = msgspec.msgpack.encode((3, "d", 1, 0, 0, [7]))
        pair.p.receive(pair.d.name, frame)
        assert pair.p.counts["frames_refused.wrong_version"] == 1

    def test_a_greeting_of_another_version_is_answered(self, make_pair: Make) -> None:
        pair = make_pair("p")
        pair.add("d", versions=Versions(3, 4))
        load = pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert load.failed is not None and load.failed.reason is Reason.WRONG_VERSION
        assert load.failed.detail.startswith("version: the source speaks 1 to 2, the target 3 to 4")

    def test_a_greeting_of_another_version_in_another_s_name_is_not(self, pair: Pair) -> None:
        greeting = m.Hello(1, pair.d.ledger.desk.identity.card())
        frame = msgspec.msgpack.encode((3, "e", int(pair.d.me.incarnation), 0, 0, greeting))
        pair.p.receive(pair.d.name, frame)
        assert not pair.log

    def test_frames_are_counted(self, pair: Pair) -> None:
        pair.pull()
        assert pair.p.counts["frames"] == len([f for f in pair.log if getattr(f, "target", "") == "p"])


class TestLeaving:
    """Goodbye: everything under way ends, on both sides, at once."""

    @pytest.mark.parametrize("push", [False, True])
    def test_leaving_ends_what_is_under_way(self, pair: Pair, push: bool) -> None:
        pair.d.habits.copies = pair.p.habits.copies = False
        load = pair.d.want("r", pair.router_ticket(), push=push)
        pair.p.stream()
        pair.settle()
        pair.d.leave()
        pair.settle()
        assert load.end is not None and load.end.reason is Reason.ABORTED
        assert not pair.p.ledger.sessions.by_number
        assert load.drops == int(push), "the source was fenced; our own copy is not at rest"

    def test_what_has_ended_already_is_left_alone(self, pair: Pair) -> None:
        pair.pull(copies=False)
        pair.d.give_up("r")
        pair.d.leave()
        assert len(pair.done(Report)) == 1

    def test_leaving_gives_every_pin_back(self, pair: Pair) -> None:
        """Rule 3: shutdown, cache reset, weight reload: nothing that was leased, or remembered, is vouched for."""
        pair.p.grant(1)
        pair.d.want("r", pair.p.grant(2), 2)
        pair.settle()
        pair.p.leave()
        assert len(pair.done(Unpin)) == 2 and not pair.p.ledger.producer.leases
        assert len(pair.p.ledger.producer.tombstones) == 0

    def test_a_node_can_be_both_sides(self, pair: Pair) -> None:
        there = pair.d.want("r", pair.p.grant(1), 1)
        back = pair.p.want("q", pair.d.grant(2), 2, source="d")
        pair.settle()
        assert there.end is not None and there.end.delivered
        assert back.end is not None and back.end.delivered
        pair.d.leave()
        pair.settle()
        assert not pair.p.ledger.sessions.by_number and not pair.p.ledger.consumer.links.by_worker


class TestIdle:
    def test_idle_is_when_nothing_is_held_or_owed(self, pair: Pair) -> None:
        assert pair.p.ledger.is_idle() and pair.p.ledger.next_deadline() is None
        pair.p.grant()
        assert not pair.p.ledger.is_idle()

    def test_a_parked_claim_is_owed_an_answer(self, pair: Pair) -> None:
        pair.d.want("r", pair.router_ticket())
        pair.settle()
        assert not pair.p.ledger.is_idle() and not pair.d.ledger.is_idle()

    def test_a_put_and_a_fence_are_waited_for(self, pair: Pair) -> None:
        pair.p.habits.store = pair.d.habits.fences = pair.p.habits.copies = False
        pair.p.put(1)
        assert not pair.p.ledger.is_idle()
        pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        pair.d.tell(ev.Departed(pair.p.name))
        assert not pair.d.ledger.is_idle()


def test_effects_are_taken_once(pair: Pair) -> None:
    pair.p.ledger.on_event(ev.PutWanted(1, ((),), ()), pair.p.now)  # type: ignore[arg-type]
    assert len(pair.p.ledger.take_effects()) == 1
    assert pair.p.ledger.take_effects() == []
    pair.p.puts[1] = ((),), 0  # type: ignore[index]
    pair.p.tell(ev.StoreEnded(1))  # type: ignore[arg-type]


def test_bytes_are_counted_where_they_were_moved(pair: Pair) -> None:
    pair.d.want("r", pair.p.grant(1), 1)
    pair.settle()
    assert pair.d.counts["bytes_moved"] == 3 * pair.d.shape.page_bytes * pair.d.shape.layers
    assert pair.p.counts["bytes_moved"] == 0


# --- strangers: frames that no healthy peer sends

NUMBERS = st.sampled_from([0, 1, 2, 3, 99, (1 << 63) - 1])
BLOCKS = st.sampled_from([(), (b"",), (b"\1\0\0\0\2\0\0\0\3\0\0\0",), (b"\xff\xff\xff\xff",), (b"\1",), (b"", b"")])
STEPS = st.builds(GroupProgress, *[st.sampled_from([0, 1, 3, -1, 1 << 40])] * 3)
PROGRESS = st.lists(STEPS, max_size=2).map(tuple)
REASONS = st.sampled_from(list(Reason))
HANDOFFS = st.sampled_from(["", f"{1:032x}.0", f"{2:032x}.0", "x" * 99])
DIGESTS = st.sampled_from([b"", b"other"])
TERMS_S = st.sampled_from([0.0, 1.0, -5.0])
STRANGE: dict[type, list[st.SearchStrategy[object]]] = {
    m.Joined: [st.sampled_from([(), (b"1",), (b"1", b"2")])],
    m.Linked: [],
    m.Reset: [NUMBERS],
    m.Goodbye: [],
    m.Claim: [HANDOFFS, NUMBERS, st.just("ticket"), DIGESTS, st.booleans()],
    m.Granted: [
        HANDOFFS,
        NUMBERS,
        NUMBERS,
        st.sampled_from([0.0, 1.0, -5.0]),
        NUMBERS,
        BLOCKS,
        PROGRESS,
        st.booleans(),
    ],
    m.GrantedFrom: [
        HANDOFFS,
        NUMBERS,
        NUMBERS,
        TERMS_S,
        NUMBERS,
        BLOCKS,
        PROGRESS,
        st.booleans(),
        st.sampled_from([(), ("p",), ("*", "d0 key"), ("",)]),
    ],
    m.ClaimRefused: [HANDOFFS, NUMBERS, REASONS, st.just("")],
    m.Renew: [NUMBERS, NUMBERS, st.sampled_from([(), (0,), (99,), (0, 0)]), st.booleans()],
    m.Renewed: [NUMBERS, NUMBERS, TERMS_S, NUMBERS],
    m.RenewRefused: [NUMBERS, NUMBERS, REASONS],
    m.Ready: [NUMBERS, NUMBERS, st.sampled_from([(), (0,), (2,), (0, 0)]), BLOCKS, PROGRESS, st.booleans()],
    m.Commit: [NUMBERS, NUMBERS],
    m.Committed: [NUMBERS, NUMBERS],
    m.Stale: [NUMBERS, NUMBERS, st.sampled_from([(), (1,), (9, 9)])],
    m.Abandon: [HANDOFFS, NUMBERS],
    m.SourceLost: [NUMBERS, NUMBERS, REASONS],
    m.Offer: [NUMBERS, NUMBERS, NUMBERS, NUMBERS, BLOCKS, DIGESTS],
    m.Accepted: [NUMBERS],
    m.Written: [NUMBERS, NUMBERS, NUMBERS, DIGESTS],
    m.Ack: [NUMBERS, NUMBERS, NUMBERS],
    m.Revoke: [NUMBERS, NUMBERS, NUMBERS],
    m.Quiesced: [NUMBERS, st.none() | REASONS],
}
MESSAGES = st.sampled_from(sorted(STRANGE, key=lambda kind: kind.__name__)).flatmap(
    lambda kind: st.builds(kind, *STRANGE[kind])
)


def test_every_message_but_the_greetings_is_tried_by_strangers() -> None:
    assert set(STRANGE) == set(typing.get_args(m.Message)) - {m.Hello, m.Welcome, m.HelloRefused}


def busy_pair() -> Pair:
    """P and D with a bit of everything under way."""
    pair = Pair("p", "d", settings=Settings(parked_max=3, sessions_max=3, tombstones_max=3, revoked_max=3))
    for party in (pair.p, pair.d):
        party.habits.copies = False
    pair.d.want("parked", pair.router_ticket(9), 9)
    pair.d.want("pulled", pair.p.grant(1), 1)
    pair.d.want("pushed", pair.router_ticket(2), 2, push=True)
    pair.p.stream(2)
    pair.d.want("streamed", pair.router_ticket(3), 3)
    pair.p.chunk(pair.p.begin(3), 1)
    pair.settle()
    return pair


def size(pair: Pair) -> int:
    """Everything that a stranger could make grow."""
    total = 0
    for party in (pair.p, pair.d):
        ledger = party.ledger
        writer, consumer = ledger.producer.writer, ledger.consumer
        total += len(ledger.producer.parked) + len(ledger.producer.tombstones) + len(ledger.producer.ended)
        total += len(ledger.producer.leases) + len(writer.outlets) + len(writer.revoked) + len(writer.sessions)
        total += len(consumer.by_handoff) + len(consumer.by_attempt) + len(consumer.by_reservation)
        total += len(consumer.links.by_worker) + len(ledger.sessions.by_number) + len(ledger.desk.owners)
        total += len(ledger.desk.timers) + len(ledger.desk.counts)
    return total


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.booleans(), MESSAGES), min_size=1, max_size=8))
def test_nothing_that_a_peer_says_raises_or_grows_or_hangs(said: list[tuple[bool, m.Message]]) -> None:
    """A peer that is let in but mad: in its own session it says anything at all."""
    pair = busy_pair()
    for from_d, message in said:
        pair.inject("d" if from_d else "p", "p" if from_d else "d", message)
    assert size(pair) < 150
    unchecked(pair)
    pair.finish()


def unchecked(pair: Pair) -> None:
    """A mad P can have D read other blocks than the prompt's: what is delivered then is P's lie, not D's mistake."""
    for party in (pair.p, pair.d):
        party._check_content = lambda load: None  # type: ignore[method-assign]
        party.check_held = lambda offset, size: None  # type: ignore[method-assign]


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(
    st.lists(st.binary(max_size=40), max_size=20),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400), st.integers(0, 255)), max_size=20),
)
def test_garbage_on_the_wire_raises_nothing_and_leaves_nothing(
    garbage: list[bytes], changes: list[tuple[int, int, int]]
) -> None:
    pair = Pair("p", "d")
    for junk in garbage:
        pair.p.receive(pair.d.name, junk)
        pair.d.receive(pair.p.name, junk)
    refused = pair.p.counts["frames_refused.bad_message"] + pair.p.counts["frames_refused.wrong_version"]
    assert refused == len(garbage)
    changed = {number: (at, value) for number, at, value in changes}

    def garble(number: int, frame: object) -> str:
        if number in changed:
            at, value = changed[number]
            raw = bytearray(frame.raw)  # type: ignore[attr-defined]
            raw[at % len(raw)] = value
            frame.raw = bytes(raw)  # type: ignore[attr-defined]
        return ""

    pair.on_post = garble  # type: ignore[assignment]
    unchecked(pair)
    pair.d.want("r", pair.router_ticket(), push=True)
    pair.p.stream()
    pair.d.want("s", pair.p.grant(2), 2)
    pair.run(1)
    pair.finish()
    assert len(pair.done(Report)) == len(pair.done(DropHold))
    assert len(pair.done(Unpin)) == 2


def test_a_flood_of_revocations_is_bounded(make_pair: Make) -> None:
    pair = make_pair(settings=Settings(revoked_max=8))
    pair.pull()
    for number in range(1, 500):
        pair.inject("d", "p", m.Revoke(LeaseId(1), 1, ReservationId(number)))
    (revoked,) = pair.p.ledger.producer.writer.revoked.values()
    assert len(revoked._seen) == 8 and revoked.cover(ReservationId(1))


def test_a_flood_of_greetings_is_bounded(make_pair: Make) -> None:
    pair = make_pair(settings=Settings(sessions_max=8))
    card = pair.d.ledger.desk.identity.card()
    for nonce in range(1, 200):
        pair.inject("d", "p", m.Hello(nonce, card), session=0, to=0)
    assert len(pair.p.ledger.sessions.by_number) == 8
    load = pair.d.want("r", pair.p.grant())
    pair.run(1)
    assert load.end is not None and load.end.delivered


@pytest.mark.parametrize("ttl_s", [1e-300, 5e-324, 0.0, -1.0, math.nan])
def test_a_time_is_handled_once_whatever_arms_it_again(
    make_pair: Make, monkeypatch: pytest.MonkeyPatch, ttl_s: float
) -> None:
    """With both other guards out of the way: no bound at the door, none on how often D speaks."""
    pair = make_pair()
    pair.pull(copies=False)
    ledger = pair.d.ledger
    (link,) = ledger.consumer.links.by_worker.values()
    monkeypatch.setattr(inbound, "DURATION_S_MIN", ttl_s)
    ledger.consumer.on_renewed(link, m.Renewed(LeaseId(1), 1, ttl_s, 0), pair.d.now)
    now = pair.d.now + 10.0
    for _ in range(3):
        ledger.on_time(now)
        renewals = [e for e in ledger.take_effects() if isinstance(e, Send) and isinstance(e.message, m.Renew)]
        assert len(renewals) == 1
        due = ledger.next_deadline()
        assert due is not None and due > now
        now = due
    monkeypatch.undo()
    pair.d.habits.copies = True
    pair.run(1.0)
