"""A registry that lies, beside one that does not: a reader's list is what the workers themselves have signed.

Each lie is told to a router and to a worker, by one of two registries: entries of any statement that was ever true, of
forged ones, and of whatever the liar likes beside them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from kvbaton.control.joining.join_token import Membership, admission_public
from kvbaton.control.joining.join_token import sign as certify
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry import statements
from kvbaton.control.registry.allowed_networks import Networks
from kvbaton.control.registry.registry_readers import RENEWAL_S, _merged, _suspect
from kvbaton.control.registry.registry_roster import RegistryRoster, RegistrySettings
from kvbaton.control.registry.registry_union import RegistryUnion, RegistryView
from kvbaton.control.registry.statement_reader import REMEMBER_S, StatementReader
from kvbaton.control.registry.statements import FRESH_S, OwnStatements
from kvbaton.control.signing import Signed
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.legality import Role

from ..rig import cluster

NAMES = ("p0", "d0", "d1")
RINGS = cluster("router", "operator", "registry-a", "registry-b", *NAMES, signs=True)
STRANGER = cluster("x0", signs=True)["x0"]
LOOK_S = 10.0
LIAR, HONEST = 0, 1  # of two entries of one life the first registry's would do
SETTINGS = RegistrySettings(settle_s=0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class World:
    """Workers that register with an honest registry, and one reader of it and of a liar."""

    def __init__(self, kind: str, networks: Networks | None = None, ring: Keyring = RINGS["router"]) -> None:
        self.kind = kind
        self.wall, self.clock = Clock(), Clock()
        self.honest = RegistryRoster(SETTINGS, 7, 0.0)
        self.honest.on_time(1.0)
        self.testimonies: dict[str, OwnStatements] = {}
        self.history: list[tuple[m.Registration, str, Signed]] = []  # all that was ever signed
        allows = (networks or Networks()).elsewhere
        self.reader: StatementReader[Any] = StatementReader(
            ring,
            allows=allows,
            renewal_s=RENEWAL_S if kind == "roster" else math.inf,
            wall=self.wall,
            clock=self.clock,
        )
        self.union: RegistryUnion[Any] = RegistryUnion(
            2, _merged if kind == "roster" else lambda entries: entries[0],
            _suspect if kind == "roster" else lambda entry: entry, self.reader,
        )  # fmt: skip
        self.departed: list[str] = []

    def registered(
        self, name: str, life: int, port: int = 80, born: float | None = None, **more: Any
    ) -> m.Registration:
        ring = RINGS[name]
        told = m.Registration(
            WorkerId(name), Incarnation(life), "both", f"127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}",
            born=self.wall.now if born is None else born, **more,
        )  # fmt: skip
        told, signed = self.testimonies.setdefault(name, OwnStatements(ring, self.wall)).of(told)
        self.history.append((told, ring.public, signed))
        self.honest.register(told, ring.public, 2.0, signed)
        return told

    def leaves(self, name: str) -> None:
        told = next(entry.registration for entry in self.honest.entries() if entry.worker == name)
        signed = self.testimonies[name].of(told, left=True)[1]
        self.honest.deregister(told.worker, told.incarnation, signed)

    def view(self, roster: RegistryRoster | None = None) -> RegistryView[Any]:
        said = (roster or self.honest).roster() if self.kind == "roster" else (roster or self.honest).directory()
        ended = frozenset(said.gone), frozenset(said.left)
        return RegistryView(said.entries, said.complete, *ended, ended=said.ended)

    def entry(self, told: m.Registration, key: str, signed: Signed | None, **more: Any) -> Any:
        if self.kind == "roster":
            return m.RosterEntry(told, key, m.WorkerState.READY, signed=signed, **more)
        at = told.worker, told.incarnation, told.role, told.control_endpoint
        return m.DirectoryEntry(*at, key, born=told.born, signed=signed, certificate=more.get("certificate", b""))

    def hears(self, registry: int, view: RegistryView[Any]) -> None:
        news = self.union.take(registry, view)
        self.departed += [str(peer) for peer in news.departed] if news else []

    def both_hear(self) -> None:
        for registry in (HONEST, LIAR):
            self.hears(registry, self.view())

    def passes(self, seconds: float) -> None:
        """Time, in which the reader looks as often as it does."""
        for _ in range(int(seconds / LOOK_S) + 1):
            self.wall.now += LOOK_S
            self.clock.now += LOOK_S
            self.union.refresh()

    def lists(self) -> dict[str, Any]:
        return {entry.worker: entry for entry in self.union.known}

    def truth(self) -> dict[str, tuple[int, str, bool]]:
        return {each.worker: self.told(each.registration, each.draining) for each in self.honest.entries()}

    def told(self, registration: m.Registration, draining: bool) -> tuple[int, str, bool]:
        if self.kind == "roster":
            return registration.incarnation, registration.http_address, draining
        return registration.incarnation, registration.control_endpoint, False

    def seen(self) -> dict[str, tuple[int, str, bool]]:
        if self.kind == "roster":
            return {name: self.told(entry.registration, entry.draining) for name, entry in self.lists().items()}
        return {name: (entry.incarnation, entry.control_endpoint, False) for name, entry in self.lists().items()}


@pytest.fixture(params=["roster", "directory"])
def world(request: pytest.FixtureRequest) -> World:
    """As a router reads, and as a worker does."""
    found = World(request.param)
    for number, name in enumerate(NAMES[:2]):
        found.registered(name, 10 + number, 80 + 10 * number)
    found.both_hear()
    assert set(found.seen()) == {"p0", "d0"} and found.seen() == found.truth()
    return found


def forged(told: m.Registration, key: str, by: Keyring, **more: Any) -> Signed:
    """A statement as its worker would have made it, signed by another."""
    said = msgspec.msgpack.encode(statements.Statement(told, key, 1 << 60, told.born, **more))
    return Signed(said, by.signer.sign("registration 1", said))


def moved(told: m.Registration) -> m.Registration:
    return msgspec.structs.replace(told, http_address="127.0.0.1:666", control_endpoint="tcp://127.0.0.1:666")


Lie = Callable[[World], RegistryView[Any]]


def honest_entry(world: World, name: str) -> tuple[m.Registration, str, Signed]:
    return next(each for each in reversed(world.history) if each[0].worker == name)


def adds_a_stranger(world: World) -> RegistryView[Any]:
    told = m.Registration(
        WorkerId("x0"), Incarnation(5), "both", "127.0.0.1:666", "tcp://127.0.0.1:666", born=world.wall.now
    )
    signed = forged(told, STRANGER.public, STRANGER)
    view = world.view()
    more = (world.entry(told, STRANGER.public, signed), world.entry(told, STRANGER.public, None))
    return replace(view, entries=(*view.entries, *more))


def adds_a_member_that_is_not_here(world: World) -> RegistryView[Any]:
    told = m.Registration(
        WorkerId("d1"), Incarnation(5), "both", "127.0.0.1:666", "tcp://127.0.0.1:666", born=world.wall.now
    )
    key = RINGS["d1"].public
    view = world.view()
    more = (world.entry(told, key, None), world.entry(told, key, forged(told, key, RINGS["registry-b"])))
    return replace(view, entries=(*view.entries, *more))


def redirects_beside_the_signature(world: World) -> RegistryView[Any]:
    told, key, signed = honest_entry(world, "d0")
    others = tuple(each for each in world.view().entries if each.worker != "d0")
    return replace(world.view(), entries=(*others, world.entry(moved(told), key, signed)))


def redirects_without_one(world: World) -> RegistryView[Any]:
    told, key, _ = honest_entry(world, "d0")
    return replace(world.view(), entries=(world.entry(moved(told), key, None),))


def redirects_with_its_own(world: World) -> RegistryView[Any]:
    told, key, _ = honest_entry(world, "d0")
    liar = RINGS["registry-b"]
    entries = (
        world.entry(moved(told), key, forged(moved(told), key, liar)),
        world.entry(moved(told), liar.public, forged(moved(told), liar.public, liar)),
    )
    return replace(world.view(), entries=entries)


def names_a_newer_life(world: World) -> RegistryView[Any]:
    told, key, _ = honest_entry(world, "d0")
    newer = msgspec.structs.replace(moved(told), incarnation=99, born=told.born + 5)
    return replace(world.view(), entries=(world.entry(newer, key, forged(newer, key, RINGS["p0"])),))


def says_that_it_left(world: World) -> RegistryView[Any]:
    told, key, signed = honest_entry(world, "d0")
    lives = frozenset({told.peer})
    words = (forged(told, key, RINGS["registry-b"], left=True), signed)
    return RegistryView((), True, lives, lives, ended=words)


def has_it_drained(world: World) -> RegistryView[Any]:
    told, key, signed = honest_entry(world, "d0")
    by_a_worker = statements.drain_order(RINGS["p0"], told.worker, told.incarnation)
    another_life = statements.drain_order(RINGS["operator"], told.worker, Incarnation(4))
    more = [{"draining": True, "order": order} for order in (None, by_a_worker, another_life)]
    return replace(world.view(), entries=tuple(world.entry(told, key, signed, **each) for each in more))


def forgets(world: World) -> RegistryView[Any]:
    return RegistryView((), True, frozenset(each[0].peer for each in world.history))


def falls_silent(world: World) -> RegistryView[Any]:
    return replace(world.view(), answers=False)


LIES: tuple[Lie, ...] = (
    adds_a_stranger, adds_a_member_that_is_not_here, redirects_beside_the_signature, redirects_without_one,
    redirects_with_its_own, names_a_newer_life, says_that_it_left, has_it_drained, forgets, falls_silent,
)  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_changes_nothing(world: World, lie: Lie) -> None:
    world.hears(LIAR, lie(world))
    assert world.seen() == world.truth() and not world.departed
    world.registered("d1", 30, 130)
    world.hears(HONEST, world.view())
    assert world.seen() == world.truth() and set(world.seen()) == set(NAMES)


@pytest.mark.parametrize("lie", LIES)
def test_a_reader_that_hears_the_liar_first_believes_it_no_more(world: World, lie: Lie) -> None:
    fresh = World(world.kind)
    fresh.honest, fresh.history = world.honest, world.history
    fresh.hears(LIAR, lie(world))
    assert all(fresh.seen()[name] == world.truth()[name] for name in fresh.seen())
    fresh.hears(HONEST, fresh.view())
    assert fresh.seen() == world.truth()


@pytest.mark.parametrize("lie", LIES)
def test_known_pairs_go_on_while_only_the_liar_answers(world: World, lie: Lie) -> None:
    """Of several registries one that is alone cannot take anyone away; a router asks the withheld ones last."""
    world.hears(HONEST, replace(world.view(), answers=False))
    world.hears(LIAR, lie(world))
    assert world.seen() == world.truth() and not world.departed


def test_what_was_once_true_is_not_played_back(world: World) -> None:
    before = {name: honest_entry(world, name) for name in ("p0", "d0")}
    world.wall.now += 10
    world.registered("d0", 50, 150)  # another life
    world.registered("p0", 10, 160, born=before["p0"][0].born)  # the same, elsewhere
    world.hears(HONEST, world.view())
    assert world.seen() == world.truth()
    old = tuple(world.entry(*each) for each in before.values())
    world.hears(LIAR, RegistryView(old, True))
    assert world.seen() == world.truth()
    world.hears(HONEST, replace(world.view(), answers=False))
    assert world.seen() == world.truth(), "the honest one need not be there"


def test_a_reader_that_was_not_there_takes_nothing_old(world: World) -> None:
    old = honest_entry(world, "d0")
    late = World(world.kind)
    late.wall.now = world.wall.now + FRESH_S + 1
    late.hears(LIAR, RegistryView((late.entry(*old),), True))
    assert late.seen() == {} and late.reader.counters["refused"]
    late.hears(LIAR, RegistryView((late.entry(*old),), True))
    assert late.reader.counters["refused"] == 1, "what was found wrong is not checked again"


def test_leaving_and_draining_count_with_a_signature_whichever_registry_brings_it(world: World) -> None:
    told = honest_entry(world, "d0")[0]
    world.leaves("p0")
    world.hears(HONEST, RegistryView((), True, answers=False))
    world.hears(LIAR, world.view())
    assert set(world.seen()) == {"d0"} and len(world.departed) == 1
    old = next(each for each in world.history if each[0].worker == "p0")
    world.hears(LIAR, replace(world.view(), entries=(*world.view().entries, world.entry(*old)), ended=()))
    assert set(world.seen()) == {"d0"}, "it does not come back"
    if world.kind == "roster":
        order = statements.drain_order(RINGS["operator"], told.worker, told.incarnation)
        entries = tuple(msgspec.structs.replace(each, order=order) for each in world.view().entries)
        world.hears(LIAR, replace(world.view(), entries=entries))
        assert world.seen()["d0"][2], "an operator has signed it"


def test_a_member_that_was_removed_is_off_the_list_whatever_registries_say(world: World) -> None:
    ring = world.reader.keyring
    peers = {name: key for name, key in ring.peers.items() if name != "d0"}
    world.reader.take_keys(msgspec.structs.replace(ring, peers=peers))
    world.union.refresh()
    assert set(world.seen()) == {"p0"}
    world.both_hear()
    assert set(world.seen()) == {"p0"}


def test_who_signs_nothing_is_taken_at_its_word_under_its_own_key_only(world: World) -> None:
    ring = RINGS["router"]
    signing = {key: value for key, value in ring.signing.items() if key != RINGS["d0"].public}
    older = World(world.kind, ring=msgspec.structs.replace(ring, signing=signing))
    told, key, _ = honest_entry(world, "d0")
    older.hears(LIAR, RegistryView((older.entry(told, RINGS["p0"].public, None),), True))
    assert older.seen() == {}
    older.hears(LIAR, RegistryView((older.entry(told, key, None),), True))
    assert set(older.seen()) == {"d0"}
    older.hears(LIAR, RegistryView((), True, left=frozenset({told.peer})))
    assert older.seen() == {}, "its leaving too is the registry's word"


def test_the_newest_statement_is_forgotten_when_no_older_one_is_fresh(world: World) -> None:
    world.leaves("d0")
    world.both_hear()
    world.clock.now += REMEMBER_S + 1
    world.wall.now += REMEMBER_S + 1
    world.both_hear()
    assert "d0" not in world.reader._newest and "p0" in world.reader._newest


def test_a_statement_that_is_only_signed_anew_is_checked_once_by_a_router_and_by_a_worker_never(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = honest_entry(world, "d0")[0]
    checked: list[Signed] = []
    monkeypatch.setattr(statements, "verified", lambda signed, _: checked.append(signed) or statements.read(signed))
    world.wall.now += 30
    world.registered("d0", told.incarnation, 90, born=told.born)
    world.both_hear()
    assert len(checked) == (world.kind == "roster") and world.seen() == world.truth()


def test_the_routers_own_networks_and_addresses_hold_whatever_registries_allow() -> None:
    world = World("roster", Networks.parse("127.0.0.0/8").without(["0.0.0.0:666"]))
    world.registered("p0", 1, 80)
    world.registered("d0", 2, 666)
    told = m.Registration(
        WorkerId("d1"), Incarnation(3), "both", "10.0.0.1:80", "tcp://10.0.0.1:81", born=world.wall.now
    )
    told, signed = OwnStatements(RINGS["d1"], world.wall).of(told)
    world.honest.register(told, RINGS["d1"].public, 2.0, signed)
    world.both_hear()
    assert set(world.seen()) == {"p0"}


class TestJoined:
    """Two keys under one name that joined at different registries."""

    SEED = b"s" * 32

    def keyed(self, name: str, since: int) -> tuple[Keyring, bytes]:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        ring = Keyring(WorkerId(name), public, secret, {WorkerId(name): public}, ())
        member = Membership(WorkerId(name), public, Role.BOTH, "0" * 16, 1 << 39, ring.signer.public, since)
        return ring, certify(member, self.SEED)

    def entry(self, world: World, ring: Keyring, certificate: bytes, life: int, born: float) -> Any:
        told = m.Registration(ring.name, Incarnation(life), "both", "127.0.0.1:80", "tcp://127.0.0.1:81", born=born)
        told, signed = OwnStatements(ring, world.wall).of(told)
        return world.entry(told, ring.public, signed, certificate=certificate)

    @pytest.mark.parametrize("kind", ["roster", "directory"])
    def test_the_first_keeps_the_name_while_it_is_listed(self, kind: str) -> None:
        ring = msgspec.structs.replace(RINGS["router"], admission=admission_public(self.SEED))
        (one, first), (two, second) = self.keyed("w", 100), self.keyed("w", 200)
        for order in ((0, 1), (1, 0)):
            world = World(kind, ring=ring)
            entries = (
                self.entry(world, one, first, 1, world.wall.now),
                self.entry(world, two, second, 2, world.wall.now + 50),  # born later, it says
            )
            for registry in (*order, *order):
                world.hears(registry, RegistryView((entries[registry],), True))
                world.hears(registry, RegistryView((entries[registry],), True, answers=True))
            assert world.seen()["w"][0] == 1
            world.hears(0, RegistryView((), True))
            assert world.seen()["w"][0] == 2, "the first is gone"
            world.hears(0, RegistryView((entries[0],), True))
            assert world.seen()["w"][0] == 1

    def test_who_was_removed_is_not_let_in_by_its_certificate(self) -> None:
        ring = msgspec.structs.replace(RINGS["router"], admission=admission_public(self.SEED))
        member, certificate = self.keyed("w", 100)
        world = World("roster", ring=msgspec.structs.replace(ring, removed=frozenset({member.public})))
        world.hears(LIAR, RegistryView((self.entry(world, member, certificate, 1, world.wall.now),), True))
        assert world.seen() == {}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_one_registry_says_the_list_is_of_signed_words_and_no_older_than_the_honest_ones(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.choice(("roster", "directory")))
    lives = dict.fromkeys(NAMES, 0)
    for _ in range(40):
        world.wall.now += rng.choice((0.5, 5, 60))
        world.clock.now += rng.choice((0.5, 5, 60))
        _lives_on(world, rng, lives)
        told = [_lie(world, rng) for _ in range(rng.randrange(6))]
        lists = [RegistryView(tuple(told), rng.random() < 0.8, answers=rng.random() < 0.9), world.view()]
        ended = tuple(rng.choice(world.history)[2] for _ in range(rng.randrange(3)) if world.history)
        lists[0] = replace(
            lists[0], ended=ended, left=frozenset(each[0].peer for each in world.history if rng.random() < 0.3)
        )
        for registry in rng.sample((HONEST, LIAR), 2):
            world.hears(registry, lists[registry])
        _check(world)


def _lives_on(world: World, rng: random.Random, lives: dict[str, int]) -> None:
    name = rng.choice(NAMES)
    here = {each.worker for each in world.honest.entries()}
    what = rng.choice(("start", "move", "leave", "renew"))
    if what == "start" or name not in here:
        lives[name] += 1
        world.registered(name, 100 * lives[name] + 1, rng.randrange(1, 600))
    elif what == "leave":
        world.leaves(name)
    else:
        told = next(each.registration for each in world.honest.entries() if each.worker == name)
        port = rng.randrange(1, 600) if what == "move" else int(told.http_address.rpartition(":")[2])
        world.registered(name, told.incarnation, port, born=told.born)


def _lie(world: World, rng: random.Random) -> Any:
    told, key, signed = rng.choice(world.history)
    if rng.random() < 0.3:
        told = moved(told)
    if rng.random() < 0.2:
        key = rng.choice([ring.public for ring in RINGS.values()])
    if rng.random() < 0.2:
        told = msgspec.structs.replace(told, incarnation=Incarnation(rng.randrange(1, 400)), born=told.born + 10)
    by = RINGS[rng.choice(("registry-b", "p0"))]
    words = rng.choice((signed, signed, None, forged(told, key, by) if by.name != told.worker else signed))
    draining = {"draining": rng.random() < 0.3} if world.kind == "roster" else {}
    return world.entry(told, key, words, **draining)


def _check(world: World) -> None:
    newest = {each.worker: each for each in world.honest.entries()}
    signed_ever = {each[2] for each in world.history}
    for name, (life, _, draining) in world.seen().items():
        entry = world.lists()[name]
        assert entry.signed in signed_ever, "the worker's own words"
        said = statements.read(entry.signed)
        assert said.peer == entry.peer and not draining
        if name in newest:
            assert (life, world.seen()[name]) == (newest[name].registration.incarnation, world.truth()[name])
        else:
            assert said.registration.born <= world.wall.now and name not in world.truth()
            assert not world.reader._newest[name].said.left
    assert newest.keys() <= world.seen().keys(), "whom an honest registry lists is listed"


def renewed(world: World, name: str) -> None:
    """The worker signs the same again, and its registry passes that on."""
    told = next(entry.registration for entry in world.honest.entries() if entry.worker == name)
    world.registered(name, told.incarnation, int(told.http_address.partition(":")[2]), told.born)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_registry_cannot_keep_a_dead_worker_listed(is_complete: bool) -> None:
    """Another process may have its address by now, and would be sent prompts and that worker's token."""
    world = World("roster")
    world.registered("p0", 10, 80)
    world.registered("d0", 11, 90)
    world.both_hear()
    before = replace(world.view(), complete=is_complete)
    world.honest.on_time(1000.0)  # nobody pings: both are gone
    world.registered("p0", 10, 80, world.wall.now)
    world.hears(HONEST, world.view())
    world.hears(LIAR, before)
    assert "d0" in world.lists(), "two registries differ, and the statement is young"
    world.passes(RENEWAL_S)
    world.registered("p0", 10, 80, world.wall.now)
    world.hears(HONEST, world.view())
    world.hears(LIAR, before)
    assert set(world.lists()) == {"p0"}


def test_renewals_that_a_registry_kept_back_let_no_worker_live_on() -> None:
    world = World("roster")
    told = world.registered("d0", 11, 90)
    world.both_hear()
    kept = []
    for _ in range(20):
        renewed(world, "d0")
        kept.append(world.history[-1][2])
    world.honest.on_time(1000.0)
    world.hears(HONEST, world.view())
    listed_s = 0.0
    for signed in kept:
        world.passes(RENEWAL_S / 2)
        world.hears(LIAR, RegistryView((world.entry(told, RINGS["d0"].public, signed),), complete=True))
        listed_s += RENEWAL_S / 2 if world.lists() else 0.0
    assert not world.lists() and listed_s <= FRESH_S + RENEWAL_S


def test_a_worker_that_signs_anew_stays_listed_and_is_no_news(world: World) -> None:
    world.passes(RENEWAL_S - 2 * LOOK_S)
    for name in ("p0", "d0"):
        renewed(world, name)
    before = world.union.known
    world.hears(HONEST, world.view())
    world.passes(RENEWAL_S - 2 * LOOK_S)
    assert set(world.lists()) == {"p0", "d0"} and world.union.known == before


def test_whoever_sleeps_or_hears_no_registry_takes_nobody_for_dead(world: World) -> None:
    world.clock.now += 10 * RENEWAL_S
    assert world.union.refresh() is None
    for registry in (HONEST, LIAR):
        world.hears(registry, replace(world.view(), answers=False))
    world.passes(2 * RENEWAL_S)
    assert set(world.lists()) == {"p0", "d0"}
