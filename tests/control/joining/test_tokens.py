"""Tokens, certificates, names and addresses of members that join, without a socket."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from kvbaton.control import key_room, keyring
from kvbaton.control.addressing import ControlError, own_address
from kvbaton.control.joining import admission_files as book
from kvbaton.control.joining import join_client
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_client import Credentials, JoinWish, auto_name, doors_of, enrolled
from kvbaton.control.joining.join_messages import (
    ClusterCard,
    JoinAdmitted,
    JoinFault,
    MemberCard,
    decode_answer,
    decode_question,
    opened_card,
    signed_card,
)
from kvbaton.control.joining.join_token import (
    CERTIFICATE_BYTES_MAX,
    TOKEN_ENV,
    CertificateFault,
    JoinToken,
    Membership,
    admission_public,
    sign,
    token_from,
    verified,
)
from kvbaton.control.keyring import Keyring, with_joined, with_removed
from kvbaton.control.registry.registry_messages import DirectoryEntry, Registration
from kvbaton.control.registry.registry_union import RegistryView
from kvbaton.control.registry.statement_reader import StatementReader
from kvbaton.control.registry.statements import OwnStatements
from kvbaton.protocol.ids import WorkerId, is_worker_id
from kvbaton.protocol.legality import Role, role_by_name

from ..rig import cluster

SEED = b"s" * 32
PUBLIC = admission_public(SEED)
NOW = 1_800_000_000.0


def key() -> str:
    return zmq.curve_keypair()[0].decode()


def member(name: str = "w1", role: Role = Role.DECODE, until: float = NOW + 100, public: str = "") -> Membership:
    return Membership(WorkerId(name), public or key(), role, "0" * 16, int(until))


def entry(told: Membership, certificate: bytes, name: str = "", public: str = "") -> DirectoryEntry:
    return DirectoryEntry(
        WorkerId(name or told.name), 1, told.role.value, "tcp://127.0.0.1:1", public or told.public, certificate
    )  # type: ignore[arg-type]


def reader_at(now: list[float], admission: bytes = PUBLIC) -> StatementReader[DirectoryEntry]:
    me = key()
    ring = Keyring(WorkerId("me"), me, "s", {WorkerId("me"): me}, (), admission=admission)
    return StatementReader(ring, wall=lambda: now[0])


def listed(reader: StatementReader[DirectoryEntry], entry: DirectoryEntry) -> dict[WorkerId, Membership]:
    """Who is let in when a registry lists this."""
    (view,) = reader.views([RegistryView((entry,), True)])
    return reader.members(view.entries)


# --- tokens


def test_a_token_is_read_back_from_its_text_and_shows_no_secret() -> None:
    token = JoinToken.new(key())
    assert JoinToken.parse(f" {token.text}\n", "x") == token
    for said in (repr(token), str(token), f"{token}"):
        assert token.secret.hex() not in said and token.text not in said and str(token.secret) not in said


@pytest.mark.parametrize("spoil", [
    lambda text: text[:-1], lambda text: text + "A",
    lambda text: text[:20] + ("B" if text[20] == "A" else "A") + text[21:],
    lambda text: text.replace("kvbt1-", "kvbt2-"), lambda text: "kvbt1-ü!", lambda _: "", lambda text: text * 9,
])  # fmt: skip
def test_a_spoilt_token_is_refused_without_being_repeated(spoil) -> None:  # type: ignore[no-untyped-def]
    bad = spoil(JoinToken.new(key()).text)
    with pytest.raises(ControlError, match="FILE") as told:
        JoinToken.parse(bad, "FILE")
    assert not bad or bad not in str(told.value)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token, path = JoinToken.new(key()), tmp_path / "token"
    path.write_text(token.text)
    path.chmod(0o640)
    with pytest.raises(ControlError, match=r"0640.*chmod 600"):
        token_from(str(path))
    path.chmod(0o600)
    assert token_from(str(path)) == token == token_from("", environ={TOKEN_ENV: token.text})
    assert token_from("", environ={}) is None
    with pytest.raises(ControlError, match="kvbaton keys token new"):
        token_from(str(tmp_path / "none"))


def test_a_directory_keeps_tokens_without_their_text_and_forgets_old_ones(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keyring.mint(keys, ["router"])
    token = book.new_token(keys, Role.DECODE, 60.0, 3)
    stored = b"".join(path.read_bytes() for path in keys.rglob("*.json"))
    assert token.secret.hex().encode() not in stored and token.text.encode() not in stored
    modes = {path.name: path.stat().st_mode & 0o777 for path in (keys / "admission.json", *(keys / "tokens").iterdir())}
    assert set(modes.values()) == {0o600}
    assert keyring.load(keys, "router").admission == (book.admission_secret(keys) and files_admission(keys))
    later = book.new_token(keys, Role.BOTH, 60.0, 0, wall=lambda: time.time() + 10_000)
    assert [each.id for each in book.tokens(keys)] == [later.id]
    assert later.door == token.door  # one door key for all doors
    (keys / "admission.json").unlink()
    with pytest.raises(ControlError, match="where the cluster's registries run"):
        book.new_token(keys, Role.BOTH, 60.0, 0)


def test_a_token_is_kept_while_somebody_is_a_member_by_it_and_after_it_was_revoked(tmp_path: Path) -> None:
    """Members stay when their token has expired; without its file they could not be revoked with it."""
    keys, later = tmp_path / "keys", time.time() + 10_000
    keyring.mint(keys, ["router"])
    mine, other = (book.new_token(keys, Role.BOTH, 60.0, 0) for _ in range(2))
    secret = book.admission_secret(keys)
    assert secret is not None
    came = Membership(WorkerId("w1"), key(), Role.BOTH, mine.id, int(later + 3600))
    book.put_joined(keys, came, sign(came, bytes.fromhex(secret.seed)))
    third = book.new_token(keys, Role.BOTH, 60.0, 0, wall=lambda: later)
    assert {each.id for each in book.tokens(keys)} == {mine.id, third.id} and other.id not in (mine.id, third.id)
    assert book.revoke_token(keys, mine.id, with_members=True, wall=lambda: later) == ["w1"]
    (keys / "joined" / "w1.json").unlink()  # as where this registry never saw it
    book.new_token(keys, Role.BOTH, 60.0, 0, wall=lambda: later + 10)
    found = book.token_file(keys, mine.id)
    assert found is not None and found.members_out
    book.new_token(keys, Role.BOTH, 60.0, 0, wall=lambda: later + 10_000)
    assert book.token_file(keys, mine.id) is None


def test_a_use_and_a_revocation_outlive_the_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is on disk only once its directory is."""
    keys = tmp_path / "keys"
    keyring.mint(keys, ["router"])
    token = book.new_token(keys, Role.BOTH, 60.0, 1)
    done: list[str] = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append("rename"), rename(old, new)))
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd)))
    book.revoke_token(keys, token.id)
    assert done[-2:] == ["rename", "tokens"]


def files_admission(keys: Path) -> bytes:
    secret = book.admission_secret(keys)
    assert secret is not None
    return admission_public(bytes.fromhex(secret.seed))


# --- certificates, and who is let in by them


def test_a_certificate_has_one_spelling_and_any_change_spoils_it() -> None:
    good = sign(member(), SEED)
    assert verified(good, PUBLIC) == verified(sign(verified(good, PUBLIC), SEED), PUBLIC)
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 0x40
        with pytest.raises(CertificateFault):
            verified(bytes(bad), PUBLIC)
    for bad in (b"", good[:64], good + b"\0", b"x" * CERTIFICATE_BYTES_MAX, good * 9):
        with pytest.raises(CertificateFault):
            verified(bytes(bad), PUBLIC)
    with pytest.raises(CertificateFault):
        verified(good, admission_public(b"t" * 32))
    with pytest.raises(CertificateFault):
        verified(good, b"short")


def test_a_stranger_that_somebody_vouches_for_gets_nowhere() -> None:
    """Whatever a registry, or one that speaks in its place, says of a member: only the admission key counts."""
    reader = reader_at([NOW])
    real, thief = member(), key()
    good = sign(real, SEED)
    lies = [
        entry(real, sign(real, b"t" * 32)),  # signed by another key: a member's own, say
        entry(real, good, public=thief),  # another key under its name
        entry(real, good, name="w2"),  # another name under its key
        entry(real, b""),
        entry(member(until=NOW - 1000), sign(member(until=NOW - 1000), SEED)),
    ]
    for lie in lies:
        assert listed(reader, lie) == {}
    assert listed(reader_at([NOW], admission=b""), entry(real, good)) == {}  # who has no admission key lets in nobody
    assert listed(reader, entry(real, good)) == {"w1": real}


def test_a_certificate_is_judged_when_it_is_learnt_and_not_again() -> None:
    now = [NOW]
    reader, ring = reader_at(now), cluster("w1")["w1"]
    told = Membership(WorkerId("w1"), ring.public, Role.BOTH, "0" * 16, int(NOW + 100), ring.signer.public)
    statements = OwnStatements(ring, lambda: now[0])

    def said() -> DirectoryEntry:
        registration = Registration(WorkerId("w1"), 1, "both", "", "tcp://127.0.0.1:1", born=NOW)  # type: ignore[arg-type]
        return msgspec.structs.replace(entry(told, sign(told, SEED)), signed=statements.of(registration)[1])

    assert listed(reader, said()) == {"w1": told}
    now[0] += 10_000
    assert listed(reader, said()) == {"w1": told}
    reader = reader_at(now)
    assert listed(reader, said()) == {}  # to this one it is news, and too old


def test_one_that_joined_displaces_nobody_who_is_minted() -> None:
    p0, other = key(), key()
    ring = Keyring(WorkerId("p0"), p0, "s", {WorkerId("p0"): p0}, (b"t" * 32,), roles={WorkerId("p0"): Role.PREFILL})
    named, keyed, fine = member("p0", public=other), member("w1", public=p0), member("w2")
    merged = with_joined(ring, {each.name: each for each in (named, keyed, fine)})
    assert dict(merged.peers) == {"p0": p0, "w2": fine.public}
    assert merged.role_of(WorkerId("p0")) is Role.PREFILL and merged.role_of(WorkerId("w2")) is Role.DECODE


def test_one_that_joined_gives_no_role_to_ranks_that_are_minted() -> None:
    """A rank's key is for what its engine's is, where both are minted; a name that is free is no engine of theirs."""
    peers = {WorkerId(name): key() for name in ("p0.dp0", "p0.1", "d0", "d0.dp0")}
    ring = Keyring(WorkerId("d0"), peers[WorkerId("d0")], "s", peers, (), roles={WorkerId("d0"): Role.DECODE})
    for role in (Role.DECODE, Role.ROUTER, Role.OPERATOR):
        merged = with_joined(ring, {WorkerId("p0"): member("p0", role)})
        assert merged.role_of(WorkerId("p0")) is role
        assert [merged.role_of(WorkerId(name)) for name in ("p0.dp0", "p0.1")] == [Role.BOTH] * 2
        assert merged.role_of(WorkerId("d0.dp0")) is Role.DECODE


def test_a_joined_file_without_a_good_signature_is_nobody(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keyring.mint(keys, ["router"])
    book.new_token(keys, Role.BOTH, 60.0, 0)
    now = time.time()
    book.put_joined(keys, member("w1", until=now + 50), sign(member("w1", until=now + 50), SEED))
    (keys / "joined" / "w2.json").write_text("{}")
    assert set(keyring.load(keys, "router").peers) == {"router"}


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x92\x01\x80", random.Random(1).randbytes(64), b"\x92" * 2000])
def test_rubbish_is_a_fault_and_nothing_else(frame: bytes) -> None:
    for decode in (decode_question, decode_answer):
        with pytest.raises(JoinFault):
            decode(frame)


def test_a_registry_cannot_change_what_a_member_knows_of_its_cluster() -> None:
    """One without the admission key passes cards on: it can leave them out, and not make, alter or repeat one."""
    made = join_client.JoinedMember(JoinWish("w1", Role.DECODE, JoinToken.new(key()), ()))
    own = member("w1", public=made.keyring.public)
    certificate = sign(own, SEED)
    cards = [ClusterCard((bytes([n]) * 32,), (_operator(key()),), at=n) for n in (5, 6, 7)]
    assert made._believe(JoinAdmitted(certificate, PUBLIC, cards[1]))
    known = made.keyring
    for lie in (
        signed_card(cards[2], b"l" * 32),  # its own key
        signed_card(cards[0], SEED),  # an earlier one
        signed_card(cards[2], SEED)[:-1] + b"x",
        sign(own, SEED),  # signed, and no card
        b"x",
    ):
        made.take(certificate, lie)
        assert made.keyring is known
    made.take(certificate, signed_card(cards[2], SEED))
    assert made.keyring.ticket_keys == cards[2].ticket_keys
    assert made.keyring.signing_keys(WorkerId("operator")) == (b"s" * 32,)
    assert made._believe(
        JoinAdmitted(certificate, PUBLIC, cards[0])
    )  # a door has the key, also one whose clock is late
    assert made.keyring.ticket_keys == cards[0].ticket_keys


def _operator(public: str) -> MemberCard:
    return MemberCard("operator", public, Role.OPERATOR, (), {public: b"s" * 32})


def test_a_card_says_who_was_removed_and_since_when(tmp_path: Path) -> None:
    keyring.mint(tmp_path / "keys", ["router", "p0", "p1"])
    book.new_token(tmp_path / "keys", Role.BOTH, 600.0, 1)
    admission = Admission(keyring.load(tmp_path / "keys", "router"))
    first = admission.card()
    assert admission.card() is first and first.removed == ()
    assert opened_card(admission.signed_card(), admission.public) == first
    key_room.remove(tmp_path / "keys", "p1")
    gone = member("w1")
    book.put_joined(tmp_path / "keys", gone, sign(gone, SEED))
    book.remove_joined(tmp_path / "keys", "w1")
    admission.keyring = keyring.reload(admission.keyring)
    later = opened_card(admission.signed_card(), admission.public)
    assert (later.removed, later.removed_keys, later.at > first.at) == (("p1", "w1"), (gone.public,), True)
    with pytest.raises(JoinFault, match="removed"):
        opened_card(signed_card(ClusterCard((b"t" * 32,), (), removed=("no name",)), SEED), PUBLIC)


def test_one_that_was_removed_is_let_in_by_no_certificate() -> None:
    joined = {WorkerId("w1"): member("w1")}
    ring = with_removed(Keyring(WorkerId("d0"), key(), "", {}, ()), [WorkerId("w1")], [joined[WorkerId("w1")].public])
    assert not with_joined(ring, joined).peers
    again = member("w1", Role.PREFILL)  # the name was given to another
    later = with_joined(ring, {again.name: again})
    assert later.peers == {again.name: again.public} and not later.is_gone(f"w1 {again.public}")


def test_a_card_shows_no_ticket_key() -> None:
    assert "t" * 8 not in repr(ClusterCard((b"t" * 32,), ()))


# --- names, addresses, and where keys come from


@pytest.mark.parametrize("environ", [
    {}, {"POD_NAME": "decode-7f9-x2"}, {"KVBATON_NAME_BASE": "a b/c", "POD_NAME": "other"}, {"HOSTNAME": "h" * 300},
    {"POD_NAME": "operator-7"}, {"POD_NAME": "router"}, {"POD_NAME": "..."},
])  # fmt: skip
def test_auto_names_are_valid_differ_and_are_kept_for_no_role(environ: dict[str, str]) -> None:
    names = {auto_name("dp1", environ) for _ in range(50)}
    assert len(names) == 50
    assert all(is_worker_id(name) and role_by_name(name) is Role.BOTH and ".dp1-" in name for name in names)
    base = next((environ[name] for name in ("KVBATON_NAME_BASE", "POD_NAME") if name in environ), "")
    assert not base.startswith("decode") or all(name.startswith(base) for name in names)


def test_an_address_is_what_the_platform_says_or_what_the_route_says() -> None:
    assert own_address("f", "", {"POD_IP": "10.1.2.3", "VLLM_HOST_IP": "10.9.9.9"}) == "10.1.2.3"
    assert own_address("f", "", {"VLLM_HOST_IP": "fd00::1"}) == "fd00::1"
    assert own_address("f", "tcp://127.0.0.1:7700", {}) == "127.0.0.1"
    for environ, towards in (
        ({"POD_IP": "a-name"}, ""),
        ({"POD_IP": "0.0.0.0"}, ""),
        ({}, ""),
        ({}, "tcp://no.invalid:1"),
    ):
        with pytest.raises(ControlError, match="control_host"):
            own_address("control_host", towards, environ)


def test_doors_are_beside_registries_unless_said() -> None:
    assert doors_of("tcp://a:7700,west@tcp://[::1]:8800") == ("tcp://a:7701", "tcp://[::1]:8801")
    assert doors_of("tcp://a:7700", "tcp://b:1") == ("tcp://b:1",)
    for registry, join_at in (("", ""), ("tcp://a:65535", ""), ("nonsense", ""), ("tcp://a:1", "b")):
        with pytest.raises(ControlError, match=r"registry|join_at"):
            doors_of(registry, join_at)


def test_keys_and_tokens_are_not_mixed_and_a_lonely_engine_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    keyring.mint(tmp_path / "keys", ["p0"])
    asked = {"role": Role.PREFILL, "registry": "tcp://127.0.0.1:1"}
    with pytest.raises(ControlError, match="give one of the two"):
        enrolled(Credentials(name="p0", keys=str(tmp_path / "keys"), join_token_file="f", **asked))  # type: ignore[arg-type]
    with pytest.raises(ControlError, match="auto is for members that join"):
        enrolled(Credentials(name="auto", keys=str(tmp_path / "keys"), **asked))  # type: ignore[arg-type]
    with pytest.raises(ControlError, match="join_token_file, or KVBATON_JOIN_TOKEN"):
        enrolled(Credentials(name="auto", **asked))  # type: ignore[arg-type]
    ring = enrolled(Credentials(name="p0", keys=str(tmp_path / "keys"), **asked))  # type: ignore[arg-type]
    assert ring.member is None and ring.keyring.name == "p0"
    token = JoinToken.new(key())
    monkeypatch.setenv(TOKEN_ENV, token.text)
    monkeypatch.setattr(join_client, "ANSWER_S", 0.1)
    with pytest.raises(ControlError, match=r"could not join at tcp://127\.0\.0\.1:2 within") as told:
        enrolled(Credentials(name="auto", **asked), deadline_s=0.1)  # type: ignore[arg-type]
    assert token.text not in str(told.value)
