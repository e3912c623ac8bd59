"""In which version a pair talks: the newest of both, settled by P; who has none in common is told so (rule 24)."""

from __future__ import annotations

import math

import msgspec
import pytest
from pair import Frame, Make, Pair
from party import Load

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import HandoffId, ReservationId
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import Abandon1, from_v1, in_v1
from kvbaton.protocol.wire.messages import NUMBER_MAX, SPOKEN, Versions, named, settle, version_bit, versions_in

V1, V12, V2, V23, V3 = Versions(1, 1), Versions(1, 2), Versions(2, 2), Versions(2, 3), Versions(3, 3)


def spoken(pair: Pair, source: str = "") -> dict[str, set[int]]:
    """The versions of everything that was put on the wire, by message."""
    found: dict[str, set[int]] = {}
    for frame in (entry for entry in pair.log if isinstance(entry, Frame) and source in ("", entry.source)):
        found.setdefault(type(frame.message).__name__, set()).add(msgspec.msgpack.decode(frame.raw)[0])
    return found


def two(make: Make, p: Versions, d: Versions) -> Pair:
    pair = make("p", versions=p)
    pair.add("d", versions=d)
    return pair


class TestRange:
    def test_what_this_code_speaks(self) -> None:
        assert (
            SPOKEN == V12 and 1 in SPOKEN and 2 in SPOKEN and 0 not in SPOKEN and 3 not in SPOKEN and "1" not in SPOKEN
        )
        assert (str(V1), str(V12), named([2, 3])) == ("1", "1 to 2", "2 to 3")

    def test_version_1_alone_says_nothing_of_versions(self) -> None:
        """Nodes that spoke it alone had no bits for them."""
        assert (V1.bits, V12.bits, V23.bits) == (0, version_bit(2), version_bit(2) | version_bit(3))
        assert versions_in(V23.bits | 7) == [2, 3] and versions_in(7) == []
        every = range(1, NUMBER_MAX + 1)
        assert versions_in(sum(map(version_bit, (0, *every, NUMBER_MAX + 1)))) == [*every]

    def test_what_version_1_has_no_field_for_is_left_out(self) -> None:
        told = m.Abandon(HandoffId("h"), 2, "aborted")
        assert in_v1(told) == Abandon1(HandoffId("h"), 2) and from_v1(in_v1(told)) == m.Abandon(HandoffId("h"), 2)

    def test_bits_of_versions_fit_a_card_and_meet_no_feature(self) -> None:
        assert not Versions(1, 16).bits & int(m.ALL_FEATURES) and Versions(1, 16).bits < 1 << 62
        assert m.feature_names(version_bit(3) | 1 << 40 | 1) == "pull, version 3, bit 40"


@pytest.mark.parametrize(
    ("ours", "greeted_in", "theirs", "version"),
    [
        (V12, 1, V1, 1),
        (V1, 1, V12, 1),
        (V12, 1, V12, 2),
        (V12, 2, V23, 2),
        (V23, 1, V12, 2),
        (V23, 2, V23, 3),
        (V2, 1, V12, 2),
    ],
)
def test_the_newest_that_both_speak_is_settled(ours: Versions, greeted_in: int, theirs: Versions, version: int) -> None:
    assert settle(ours, greeted_in, theirs.bits | 7) == version


@pytest.mark.parametrize(
    ("ours", "greeted_in", "theirs", "detail"),
    [
        (V12, 3, V3, "the source speaks 1 to 2, the target 3;"),
        (V1, 2, V23, "the source speaks 1, the target 2 to 3;"),
        (V3, 1, V12, "the source speaks 3, the target 1 to 2;"),
        (V2, 1, V1, "the source speaks 2, the target 1;"),
    ],
)
def test_none_in_common_is_told_with_both_ranges(
    ours: Versions, greeted_in: int, theirs: Versions, detail: str
) -> None:
    with pytest.raises(ProtocolError, match=f"wrong_version: version: {detail}"):
        settle(ours, greeted_in, theirs.bits)


@pytest.mark.parametrize(
    ("p", "d", "version"),
    [(V1, V1, 1), (V1, V12, 1), (V12, V1, 1), (V12, V12, 2), (V2, V12, 2), (V12, V2, 2), (V23, V12, 2), (V12, V23, 2)],
)
class TestPairs:
    """Each of them with each other, in every mode; nothing but the greeting is in another version than the settled."""

    def check(self, pair: Pair, load: Load, version: int) -> None:
        assert load.end is not None and load.end.delivered
        said = spoken(pair)
        assert said.pop("Hello") == {pair.d.ledger.desk.identity.versions.oldest}
        assert set().union(*said.values()) == {version}
        assert not any(name.startswith("frames_refused") for party in (pair.p, pair.d) for name in party.counts)
        assert pair.p.counts[f"sessions.{version}"] == 1
        assert pair.d.ledger.consumer.links.by_worker[pair.p.name].version == version

    def test_pull(self, make_pair: Make, p: Versions, d: Versions, version: int) -> None:
        pair = two(make_pair, p, d)
        load = pair.pull()
        self.check(pair, load, version)

    @pytest.mark.parametrize("push", [False, True])
    def test_streaming_and_push(self, make_pair: Make, p: Versions, d: Versions, version: int, push: bool) -> None:
        pair = two(make_pair, p, d)
        load = pair.d.want("r", pair.router_ticket(), push=push)
        pair.settle()
        source = pair.p.begin()
        pair.p.chunk(source, 2)
        pair.settle()
        pair.p.chunk(source, 1)
        pair.p.complete(source)
        pair.settle()
        self.check(pair, load, version)

    def test_goodbye_and_reset(self, make_pair: Make, p: Versions, d: Versions, version: int) -> None:
        pair = two(make_pair, p, d)
        load = pair.pull()
        pair.p.ledger.sessions.by_number.clear()
        again = pair.d.want("s", pair.p.grant(2), 2)
        pair.settle()
        assert spoken(pair)["Reset"] == {version} and again.end is not None and again.end.delivered
        pair.d.leave()
        pair.settle()
        assert spoken(pair)["Goodbye"] == {version} and load.end is not None


@pytest.mark.parametrize(("p", "d"), [(V1, V23), (V12, V3), (V3, V12), (V2, V1)])
def test_a_pair_without_a_version_in_common_is_refused_at_once_in_a_version_that_d_reads(
    make_pair: Make, p: Versions, d: Versions
) -> None:
    pair = two(make_pair, p, d)
    load = pair.pull()
    assert load.failed is not None and load.failed.reason is Reason.WRONG_VERSION
    assert f"the source speaks {p}, the target {d};" in load.failed.detail
    assert spoken(pair, "p") == {"HelloRefused": {d.oldest}} and not pair.p.ledger.sessions.by_number
    assert pair.p.counts["hello_refused.wrong_version"] == 1


def test_a_version_that_is_required_is_named(make_pair: Make) -> None:
    pair = make_pair("p")
    pair.add("d", versions=Versions(1, 3), required=version_bit(3))
    load = pair.pull()
    assert load.failed is not None
    assert (load.failed.reason, load.failed.detail) == (
        Reason.WRONG_VERSION,
        "features: the peer requires version 3",
    )


def test_a_welcome_in_a_version_that_d_does_not_speak_is_no_answer(make_pair: Make) -> None:
    """A P that settles for what it likes: D's handshake ends by its deadline."""
    pair = two(make_pair, V12, V1)
    pair.lose(m.Hello, math.inf)
    load = pair.d.want("r", pair.router_ticket())
    card = pair.p.ledger.desk.identity.card()
    pair.inject("p", "d", m.Welcome(1, card, "tcp", (b"1",)), session=1)
    assert pair.d.counts["frames_refused.wrong_version"] == 1
    pair.run(60)
    assert load.failed is not None and load.failed.reason is Reason.HANDSHAKE_TIMEOUT


class TestReasons:
    """What version 2 adds: whoever gives up says why. Version 1 does without."""

    @pytest.mark.parametrize(("d", "counted"), [(V12, "aborted"), (V1, "unsaid")])
    def test_p_counts_why_readers_leave(self, make_pair: Make, d: Versions, counted: str) -> None:
        pair = two(make_pair, V12, d)
        pair.d.habits.copies = False
        pair.double(m.Abandon)
        pair.pull()
        pair.give_up()
        assert {n: c for n, c in pair.p.counts.items() if n.startswith("abandoned.")} == {f"abandoned.{counted}": 1}

    def test_who_has_left_does_not_leave_again(self, make_pair: Make) -> None:
        pair = make_pair("p", "d")
        pair.d.habits.copies = False
        pair.double(m.Abandon)
        pair.d.want("r", pair.p.grant(max_readers=2))
        pair.settle()
        pair.give_up()
        assert pair.p.counts["abandoned.aborted"] == 1 and pair.p.ledger.producer.leases

    @pytest.mark.parametrize(("d", "counted"), [(V12, "aborted"), (V1, "unsaid")])
    def test_also_of_those_that_are_written_to(self, make_pair: Make, d: Versions, counted: str) -> None:
        pair = two(make_pair, V12, d)
        pair.p.habits.copies = False
        pair.double(m.Revoke)
        pair.p.stream()
        pair.d.want("r", pair.router_ticket(), push=True)
        pair.settle()
        pair.give_up()
        assert pair.said(m.Revoke)[0].reservation == ReservationId(1)
        assert {n: c for n, c in pair.p.counts.items() if n.startswith("abandoned.")} == {f"abandoned.{counted}": 1}

    def test_a_reason_of_a_later_version_is_counted_as_other(self, pair: Pair) -> None:
        """Counters do not grow by what peers make up."""
        pair.pull(copies=False)
        pair.inject("d", "p", m.Abandon(pair.said(m.Claim)[0].handoff, 1, "bored"))
        assert pair.p.counts["abandoned.other"] == 1

    @pytest.mark.parametrize(("p", "why"), [(V12, " (lease_expired)"), (V1, "")])
    def test_a_stale_commit_says_what_ended_the_lease(self, make_pair: Make, p: Versions, why: str) -> None:
        pair = two(make_pair, p, V12)
        load = pair.pull(copies=False)
        pair.cut("d")
        pair.run(20)
        pair.p.reuse(1)
        pair.heal()
        pair.d.finish()
        pair.settle()
        assert load.end is not None and load.end.reason is Reason.STALE
        assert load.end.detail == f"the source's blocks were reused before the commit{why}"


def test_a_source_that_came_back_with_an_older_release_is_greeted_again_though_nobody_told(make_pair: Make) -> None:
    """It passes over what is said in version 2: every fourth claim is in the oldest version, and gets a Reset."""
    pair = two(make_pair, V12, V12)
    pair.pull()
    pair.add("p", versions=V1)
    load = pair.d.want("s", pair.p.grant(2), 2)
    pair.run(5)
    assert load.end is not None and load.end.delivered and pair.d.ledger.consumer.links.by_worker["p"].version == 1
