"""The join door over real sockets: who is let in, who is not and is told why, and what a flood costs."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvbaton.control import key_room, keyring
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining import admission_files as book
from kvbaton.control.joining import join_door
from kvbaton.control.joining import join_messages as m
from kvbaton.control.joining.admission import HERE_S, Admission
from kvbaton.control.joining.join_token import LIFE_S, JoinToken, Membership, proof, sign, verified
from kvbaton.control.sockets import SocketPlane
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role

from ..rig import until
from .gatehouse import Gatehouse, Knocker, Wall, gatehouse

Kind = m.RefusalKind


@pytest.fixture(scope="module")
def wall() -> Wall:
    return Wall()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, wall: Wall) -> Iterator[Gatehouse]:
    with gatehouse(tmp_path_factory.mktemp("cluster") / "keys", wall=wall) as found:
        yield found


@pytest.fixture
def knocker(house: Gatehouse) -> Iterator[Knocker]:
    with Knocker(house) as found:
        yield found


def kind(answer: m.Answer | None) -> Kind | None:
    return answer.kind if isinstance(answer, m.JoinRefused) else None


def test_a_member_gets_a_certificate_for_its_own_key_and_what_it_needs_of_the_cluster(
    house: Gatehouse, knocker: Knocker
) -> None:
    token = house.token(Role.BOTH)
    answer = knocker.join(token, "w-first", Role.DECODE)
    assert isinstance(answer, m.JoinAdmitted)
    told = verified(answer.certificate, answer.admission)
    assert (told.name, told.public, told.role, told.token) == ("w-first", knocker.public, Role.DECODE, token.id)
    assert answer.cluster.ticket_keys == house.keyring.ticket_keys
    cards = {card.name: card for card in answer.cluster.members}
    assert set(cards) == {"operator", "router"} and cards["router"].public == house.keyring.public
    assert cards["operator"].signing[cards["operator"].public] == house.keyring.signing_keys(WorkerId("operator"))[0]
    until(lambda: keyring.load(house.directory, "router").peers.get("w-first") == knocker.public)
    assert "w-first" not in keyring.load(house.directory, "p0").peers  # engines hear of it from the registry


def test_the_same_key_name_and_token_is_the_same_use_and_another_key_is_another(house: Gatehouse) -> None:
    token = house.token(uses=2)
    with Knocker(house) as first, Knocker(house) as second, Knocker(house) as third:
        assert all(isinstance(first.join(token, "w-same"), m.JoinAdmitted) for _ in range(3))
        assert house.uses(token) == 1
        assert isinstance(second.join(token, "w-other"), m.JoinAdmitted)
        assert kind(third.join(token, "w-third")) is Kind.USED_UP
        assert isinstance(first.join(token, "w-same"), m.JoinAdmitted)  # its answer may have been lost
    assert house.uses(token) == 2


def test_uses_are_exact_when_many_come_at_once(house: Gatehouse) -> None:
    token = house.token(uses=7)
    kinds: list[object] = []

    def come(number: int) -> None:
        with Knocker(house) as one:
            kinds.append(kind(one.join(token, f"w-race{number}")))

    threads = [threading.Thread(target=come, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(map(str, kinds)) == sorted(["None"] * 7 + [str(Kind.USED_UP)] * 13)
    assert house.uses(token) == 7


def test_an_unknown_token_and_a_wrong_proof_get_one_answer(house: Gatehouse, knocker: Knocker) -> None:
    good, strange = house.token(), JoinToken.new(house.admission.door_public)
    right = proof(good.key, knocker.public, "w-a", Role.BOTH)
    answers = [
        knocker.ask(m.Join(strange.id, "w-a", Role.BOTH, proof(strange.key, knocker.public, "w-a", Role.BOTH))),
        knocker.ask(m.Join(good.id, "w-a", Role.BOTH, b"\0" * 32)),
        knocker.ask(m.Join(good.id, "w-b", Role.BOTH, right)),  # the proof is for another name,
        knocker.ask(m.Join(good.id, "w-a", Role.DECODE, right)),  # another role,
        knocker.ask(m.Join("../tickets", "w-a", Role.BOTH, right)),
    ]
    with Knocker(house) as other:  # another key
        answers.append(other.ask(m.Join(good.id, "w-a", Role.BOTH, right)))
    house_revokes = book.revoke_token(house.directory, good.id)
    answers.append(knocker.ask(m.Join(good.id, "w-a", Role.BOTH, b"\0" * 32)))  # nor does that tell it apart
    assert house_revokes == []
    assert {kind(answer) for answer in answers} == {Kind.TOKEN} and len(set(answers)) == 1
    assert house.uses(good) == 0


def test_what_a_token_does_not_allow_is_refused_by_its_reason(house: Gatehouse, knocker: Knocker, wall: Wall) -> None:
    prefill, short, revoked = house.token(Role.PREFILL), house.token(expires_s=30.0), house.token()
    book.revoke_token(house.directory, revoked.id)
    assert kind(knocker.join(prefill, "w-role", Role.DECODE)) is Kind.ROLE
    assert kind(knocker.join(prefill, "w-role", Role.BOTH)) is Kind.ROLE
    assert kind(knocker.join(house.token(), "w-role", Role.OPERATOR)) is Kind.ROLE
    assert kind(knocker.join(house.token(), "w-role", Role.ROUTER)) is Kind.ROLE
    assert kind(knocker.join(revoked, "w-role")) is Kind.REVOKED
    assert kind(knocker.join(house.token(), "p0")) is Kind.NAME  # minted
    assert kind(knocker.join(house.token(), "operator-2")) is Kind.NAME  # kept for a role
    wall.ahead_s = 31.0
    try:
        assert kind(knocker.join(short, "w-role")) is Kind.EXPIRED
    finally:
        wall.ahead_s = 0.0
    assert house.uses(prefill) == house.uses(short) == house.uses(revoked) == 0
    assert not (house.directory / "joined" / "w-role.json").exists()


@pytest.mark.parametrize("name", ["p0.1", "p0.dp0", "p0.dp3-bcdfgh", "q0", "q0.dp7", "q0.dp7-bcdfgh", "q0.dp1.2"])
def test_nobody_joins_as_a_part_of_a_minted_engine(tmp_path: Path, name: str) -> None:
    """The router keeps one standing for all ranks of an engine, and an operator drains them by its name."""
    keyring.mint(tmp_path / "keys", ["router", "operator", "p0", "q0.dp1"])
    book.new_token(tmp_path / "keys", Role.BOTH, 600.0, 1)
    with gatehouse(tmp_path / "keys") as house, Knocker(house) as one, Knocker(house) as other:
        assert kind(one.join(house.token(), name)) is Kind.NAME
        assert isinstance(other.join(house.token(), f"x{name}"), m.JoinAdmitted)


def test_a_key_has_one_name(house: Gatehouse, knocker: Knocker) -> None:
    token = house.token()
    assert isinstance(knocker.join(token, "w-one"), m.JoinAdmitted)
    until(lambda: "w-one" in house.admission.keyring.joined)
    assert kind(knocker.join(token, "w-two")) is Kind.NAME
    minted = keyring.load(house.directory, "p0")
    with Knocker(house, (minted.public, minted.secret)) as p0:
        assert kind(p0.join(token, "w-three")) is Kind.NAME


def test_a_name_that_is_alive_under_another_key_is_not_given(
    house: Gatehouse, knocker: Knocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = house.token()
    assert isinstance(knocker.join(token, "w-taken"), m.JoinAdmitted)
    alive = [True]
    monkeypatch.setattr(house.door, "_is_living", lambda name, key: alive[0] and key == knocker.public)
    with Knocker(house) as other:
        assert kind(other.join(token, "w-taken")) is Kind.TAKEN
        alive[0] = False
        assert kind(other.join(token, "w-taken")) is Kind.TAKEN, "it was at the door a moment ago, and never listed"
        house.registry._roster.served.put(knocker.public, None)  # a restart, whose life before is gone from the list
        assert isinstance(other.join(token, "w-taken"), m.JoinAdmitted)


def test_two_keys_do_not_have_a_name_by_turns(house: Gatehouse, knocker: Knocker, wall: Wall) -> None:
    """Of members that no registry lists, such as ranks that use a store, each showing of a certificate took it back."""
    token = house.token()
    first = knocker.join(token, "w-turns")
    assert isinstance(first, m.JoinAdmitted)
    with Knocker(house) as other:
        assert kind(other.join(token, "w-turns")) is Kind.TAKEN
        wall.ahead_s = HERE_S + 1  # the first is silent for so long
        try:
            second = other.join(token, "w-turns")
            assert isinstance(second, m.JoinAdmitted)
            for _ in range(2):
                assert kind(knocker.ask(m.Present(first.certificate))) is Kind.TAKEN
                assert isinstance(other.ask(m.Present(second.certificate)), m.JoinAdmitted)
            assert kind(knocker.join(token, "w-turns")) is Kind.TAKEN
        finally:
            wall.ahead_s = 0.0
    assert house.uses(token) == 2
    kept = book.joined_file(house.directory, "w-turns")
    assert kept is not None and kept.public == other.public


def test_a_young_registry_gives_nobodys_name_to_another(tmp_path: Path) -> None:
    """Started again, it has not heard yet who is alive; whoever is quick with a token must not get their names."""
    with gatehouse(tmp_path / "keys") as house:
        token = house.token()
        with Knocker(house) as owner:
            assert isinstance(owner.join(token, "w-owner"), m.JoinAdmitted)
            keys = _keys(owner)
    with gatehouse(tmp_path / "keys", settle_s=3.0) as house, Knocker(house) as thief, Knocker(house, keys) as owner:
        assert kind(thief.join(token, "w-owner")) is Kind.TAKEN
        assert isinstance(owner.join(token, "w-owner"), m.JoinAdmitted)
        assert isinstance(thief.join(token, "w-thief"), m.JoinAdmitted)  # a name that nobody had


def test_a_certificate_is_good_at_another_door_and_only_with_its_key(house: Gatehouse, tmp_path: Path) -> None:
    other = tmp_path / "keys"
    keyring.mint(other, ["router", "operator"])
    for name in ("admission.json", "public-admission.json"):
        (other / name).write_bytes((house.directory / name).read_bytes())
        (other / name).chmod(0o600)
    token = house.token()
    with Knocker(house) as one:
        admitted = one.join(token, "w-two-doors")
        assert isinstance(admitted, m.JoinAdmitted)
        with gatehouse(other) as second, Knocker(second, _keys(one)) as same, Knocker(second) as thief:
            assert kind(thief.ask(m.Present(admitted.certificate))) is Kind.CERTIFICATE
            assert not (other / "joined").exists()
            again = same.ask(m.Present(admitted.certificate))
            assert isinstance(again, m.JoinAdmitted) and again.certificate == admitted.certificate
            until(lambda: "w-two-doors" in second.admission.keyring.joined)
            assert kind(same.join(token, "w-two-doors")) is Kind.TOKEN  # a token that this registry does not have


def test_a_certificate_that_nobody_signed_expired_or_is_minted_is_refused(
    house: Gatehouse, knocker: Knocker, wall: Wall
) -> None:
    now = int(wall())
    mine = Membership("w-forged", knocker.public, Role.BOTH, "0" * 16, now + 100)  # type: ignore[arg-type]
    seed = house.admission._seed
    vouched = Membership("w-forged", knocker.public, Role.BOTH, "", now + 100)  # type: ignore[arg-type]
    old = Membership("w-forged", knocker.public, Role.BOTH, "0" * 16, now - 100)  # type: ignore[arg-type]
    assert kind(knocker.ask(m.Present(sign(mine, b"s" * 32)))) is Kind.CERTIFICATE
    assert kind(knocker.ask(m.Present(b""))) is Kind.CERTIFICATE
    assert kind(knocker.ask(m.Present(sign(old, seed)))) is Kind.CERTIFICATE
    assert kind(knocker.ask(m.Present(sign(vouched, seed)))) is Kind.NAME
    spoilt = bytearray(sign(mine, seed))
    spoilt[70] ^= 1
    assert kind(knocker.ask(m.Present(bytes(spoilt)))) is Kind.CERTIFICATE


def test_removed_is_removed_until_the_certificate_has_expired(house: Gatehouse, knocker: Knocker, wall: Wall) -> None:
    token = house.token()
    admitted = knocker.join(token, "w-gone")
    assert isinstance(admitted, m.JoinAdmitted)
    key_room.remove(house.directory, "w-gone")
    assert "w-gone" not in keyring.load(house.directory, "router").peers
    assert kind(knocker.ask(m.Present(admitted.certificate))) is Kind.REMOVED
    assert kind(knocker.join(token, "w-gone")) is Kind.REMOVED
    wall.ahead_s = LIFE_S + 200.0
    try:
        house.admission.sweep()
    finally:
        wall.ahead_s = 0.0
    assert not list((house.directory / "joined").glob("*.json"))


def test_a_member_that_was_removed_does_not_come_back_by_itself(house: Gatehouse, wall: Wall) -> None:
    """Its token may be good for a month more; the name is free in an hour."""
    member = house.join(house.token(expires_s=86_400.0), "w-back")
    key_room.remove(house.directory, "w-back")
    member._show(house.door.endpoint)
    wall.ahead_s = LIFE_S + 200.0
    try:
        house.admission.sweep()
        member._show(house.door.endpoint)
        assert book.joined_file(house.directory, "w-back") is None
    finally:
        wall.ahead_s = 0.0


def test_a_token_revoked_with_its_members_takes_them_with_it(house: Gatehouse, knocker: Knocker) -> None:
    token = house.token()
    admitted = knocker.join(token, "w-with")
    assert isinstance(admitted, m.JoinAdmitted)
    assert book.revoke_token(house.directory, token.id, with_members=True) == ["w-with"]
    assert kind(knocker.ask(m.Present(admitted.certificate))) is Kind.REMOVED
    (house.directory / "joined" / "w-with.json").unlink()  # as where another registry never saw it
    assert kind(knocker.ask(m.Present(admitted.certificate))) is Kind.REMOVED


def test_those_who_were_removed_take_nobodys_place(house: Gatehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crowd that came by a stolen token would keep all others out for an hour after it was thrown out."""
    stolen, token = house.token(), house.token()
    here = len(list(book.joined_files(house.directory)))
    monkeypatch.setattr(book, "JOINED_MAX", here + 3)
    for number in range(3):
        with Knocker(house) as one:
            assert isinstance(one.join(stolen, f"w-crowd{number}"), m.JoinAdmitted)
    with Knocker(house) as honest:
        assert kind(honest.join(token, "w-late")) is Kind.FULL
        book.revoke_token(house.directory, stolen.id, with_members=True)
        assert isinstance(honest.join(token, "w-late"), m.JoinAdmitted)


def test_a_stolen_token_admits_nobody_after_its_revocation_and_who_is_in_stays(
    house: Gatehouse, knocker: Knocker
) -> None:
    token = house.token()
    admitted = knocker.join(token, "w-stays")
    assert isinstance(admitted, m.JoinAdmitted)
    book.revoke_token(house.directory, token.id)
    with Knocker(house) as thief:
        assert kind(thief.join(token, "w-thief")) is Kind.REVOKED
    assert isinstance(knocker.ask(m.Present(admitted.certificate)), m.JoinAdmitted)


@pytest.mark.parametrize("rubbish", [b"", b"\x00", b"\xc1", b"x" * 900, m.encode(m.JoinRefused(Kind.TOKEN))])
def test_what_is_no_question_gets_no_answer_and_ends_nothing(
    house: Gatehouse, knocker: Knocker, rubbish: bytes
) -> None:
    assert knocker.ask(rubbish, wait_s=0.1) is None
    assert kind(knocker.join(house.token(), "p0")) is Kind.NAME


def test_a_directory_that_cannot_be_written_lets_nobody_in(
    house: Gatehouse, knocker: Knocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = house.token(uses=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book, "put_token", full)
    assert kind(knocker.join(token, "w-busy")) is Kind.BUSY
    monkeypatch.undo()
    assert isinstance(knocker.join(token, "w-busy"), m.JoinAdmitted)


def test_a_directory_that_cannot_be_opened_is_said_and_what_was_renewed_is_written_later(
    house: Gatehouse, knocker: Knocker, monkeypatch: pytest.MonkeyPatch, wall: Wall
) -> None:
    """As where all descriptors are taken for a while."""
    admission, name = Admission(house.keyring, wall=wall), WorkerId("w-kept")
    admitted = knocker.join(house.token(), name)
    assert isinstance(admitted, m.JoinAdmitted)
    admission.keyring = keyring.load(house.directory, "router")
    wall.ahead_s = 0.7 * LIFE_S
    try:
        renewed = verified(admission.vouch(name, knocker.public, Role.BOTH), admission.public)
    finally:
        wall.ahead_s = 0.0
    open_ = os.open

    def none_left(path: object, *more: int) -> int:
        if path == house.directory:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_(path, *more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", none_left)
    faults = house.door._thread.faults
    with pytest.raises(ControlError, match="Too many open files"):
        admission.save()
    assert kind(knocker.ask(m.Present(admitted.certificate))) is Kind.BUSY
    assert house.door._thread.faults == faults
    monkeypatch.undo()
    admission.save()
    found = book.joined_file(house.directory, name)
    assert found is not None and found.until == renewed.until > verified(admitted.certificate, admission.public).until


def test_who_says_too_much_or_comes_in_crowds_is_hung_up_on_and_honest_members_join(
    house: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = house.token()
    before = house.door.counters["hung_up"]
    with Knocker(house) as loud:
        loud.socket.send_multipart([b"x" * 900] * 200)  # one message of many parts, which no bound of libzmq holds
        until(lambda: house.door.counters["hung_up"] > before)
    monkeypatch.setattr(join_door, "CONNECTIONS_MAX", 20)
    crowd = [socket.create_connection(("127.0.0.1", int(house.door.endpoint.rpartition(":")[2]))) for _ in range(30)]
    try:
        until(lambda: house.door.counters["hung_up"] > before + 1)
        member = house.join(token, "w-honest")
    finally:
        for each in crowd:
            each.close()
    assert member.keyring.certificate
    monkeypatch.undo()
    monkeypatch.setattr(join_door, "CONNECTION_S", 0.2)
    now = house.door.counters["hung_up"]
    with socket.create_connection(("127.0.0.1", int(house.door.endpoint.rpartition(":")[2]))) as idle:
        until(lambda: house.door.counters["hung_up"] > now)
        idle.settimeout(20.0)
        while idle.recv(1024):  # libzmq's greeting, then the end
            pass


def test_a_flood_of_what_is_no_question_is_heard_only_so_much_in_a_turn(
    house: Gatehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the door's key, of an old token say, can send odd messages faster than they are skipped."""

    class Flooded:
        heard = 0

        def recv_multipart(self, *_: object, **__: object) -> list[zmq.Frame]:
            self.heard += 1
            if self.heard > 10_000:
                raise AssertionError("the door hears nobody else any more")
            return [zmq.Frame(b"\0route"[:5]), zmq.Frame(b"x"), zmq.Frame(b"y")]

    admission = Admission(house.keyring)
    door = join_door.JoinDoor(admission, "tcp://127.0.0.1:0", house.registry)
    real, flooded = door._porch._socket, Flooded()
    try:
        monkeypatch.setattr(door._porch, "_socket", flooded)
        door._turn(0.0)
        assert flooded.heard == join_door.QUESTIONS_PER_WINDOW_MAX and door._porch.deaf
    finally:
        monkeypatch.setattr(door._porch, "_socket", real)
        door.close()


@pytest.mark.parametrize("missing", ["dup", "socket"])
def test_a_door_that_ran_out_of_descriptors_as_it_hung_up_opens_again(
    house: Gatehouse, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    failed: list[int] = []

    def none_left(fd: object = None, *_: object, **__: object) -> int:
        if missing == "dup" and fd != house.door._porch._listening.fileno():
            return dup(fd)  # type: ignore[arg-type]
        failed.append(1)
        raise (OSError if missing == "dup" else zmq.ZMQError)(errno.EMFILE)

    token, dup = house.token(), os.dup
    monkeypatch.setattr(join_door, "CONNECTION_S", 0.2)
    if missing == "dup":
        monkeypatch.setattr(join_door.os, "dup", none_left)
    else:
        monkeypatch.setattr(house.door._porch, "_plane", _Without(house.door._porch._plane, none_left))
    with socket.create_connection(("127.0.0.1", int(house.door.endpoint.rpartition(":")[2]))):
        until(lambda: len(failed) > 0)
    monkeypatch.undo()
    assert house.join(token, f"w-after-{missing}").keyring.certificate


class _Without:
    """A plane that has no more sockets."""

    def __init__(self, plane: SocketPlane, server: Callable[..., int]) -> None:
        self._plane, self.server = plane, server

    def __getattr__(self, name: str) -> object:
        return getattr(self._plane, name)


def test_an_oversized_question_is_not_heard(house: Gatehouse) -> None:
    before = house.door.counters["questions"]
    with Knocker(house) as big:
        assert big.ask(b"x" * (m.QUESTION_BYTES_MAX + 200), wait_s=0.3) is None
    with Knocker(house) as small:
        assert kind(small.join(house.token(), "p0")) is Kind.NAME
    assert house.door.counters["questions"] == before + 1


def test_a_directory_without_admission_key_has_no_door(tmp_path: Path) -> None:
    keyring.mint(tmp_path / "keys", ["router"])
    with pytest.raises(ControlError, match="kvbaton keys token new"):
        Gatehouse(tmp_path / "keys")


def _keys(knocker: Knocker) -> tuple[str, str]:
    ring = knocker._plane.keyring
    return ring.public, ring.secret
