from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from kvbaton.control import key_room, keyring
from kvbaton.control.key_room import report
from kvbaton.control.signing import SIGNATURE_BYTES, Signer, verify
from kvbaton.protocol.ids import WorkerId

P0 = WorkerId("p0")


@pytest.fixture
def minted(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "cluster", ["p0", "d0"])
    return tmp_path / "cluster"


def test_a_signature_is_of_one_key_one_context_and_one_payload() -> None:
    mine, other = (Signer.of(zmq.curve_keypair()[1].decode()) for _ in range(2))
    signed = mine.sign("value", b"bytes")
    assert len(signed) == SIGNATURE_BYTES and verify("value", mine.public, b"bytes", signed)
    assert not verify("value", other.public, b"bytes", signed)
    assert not verify("registration", mine.public, b"bytes", signed)
    assert not verify("value", mine.public, b"byteS", signed)
    assert not verify("value", mine.public, b"bytes", signed[:-1])
    assert not verify("value", b"short", b"bytes", signed)
    with pytest.raises(ValueError, match="one line"):
        mine.sign("value\nbytes", b"")


def test_a_signing_key_comes_from_the_curve_secret_and_is_not_it() -> None:
    secret = zmq.curve_keypair()[1].decode()
    signer = Signer.of(secret)
    assert signer.public == Signer.of(secret).public
    assert signer.public != zmq.utils.z85.decode(zmq.curve_public(secret.encode()))
    assert secret not in repr(signer)


def test_who_is_minted_is_known_by_its_signing_key(minted: Path) -> None:
    p0, d0 = keyring.load(minted, "p0"), keyring.load(minted, "d0")
    assert d0.signing_keys(P0) == (p0.signer.public,)
    assert d0.signing_keys(WorkerId("nobody")) == ()
    assert not report(minted).problems


def test_while_a_key_is_rotated_both_sign_and_afterwards_the_new_one(minted: Path) -> None:
    old = keyring.load(minted, "p0")
    key_room.rotate(minted, "p0")
    new, d0 = keyring.load(minted, "p0"), keyring.load(minted, "d0")
    assert d0.signing_keys(P0) == (new.signer.public, old.signer.public) and new.signer.public != old.signer.public
    key_room.finish(minted, "p0")
    assert keyring.reload(d0).signing_keys(P0) == (new.signer.public,)
    key_room.remove(minted, "p0")
    assert keyring.reload(d0).signing_keys(P0) == () and not list(minted.rglob("p0*"))


def test_a_directory_of_an_earlier_release_is_completed_by_who_has_the_secret(minted: Path) -> None:
    for path in (minted / "public").glob("*.signing"):
        path.unlink()
    d0 = keyring.load(minted, "d0")
    assert d0.signing_keys(P0) == () and (minted / "public" / "d0.signing").exists()
    assert [problem.split()[0] for problem in report(minted).problems] == [str(minted / "public" / "p0.signing")]
    p0 = keyring.load(minted, "p0")
    assert keyring.reload(d0).signing_keys(P0) == (p0.signer.public,)


def test_where_nothing_can_be_written_a_member_still_signs(minted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (minted / "public" / "p0.signing").unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvbaton.control.key_files.replace", full)
    p0 = keyring.load(minted, "p0")
    assert p0.signing_keys(P0) == (p0.signer.public,) and not (minted / "public" / "p0.signing").exists()
