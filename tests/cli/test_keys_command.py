"""`kvbaton keys` as an operator uses it: what it prints is what the next step needs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import zmq

from kvbaton.cli.key_tokens import AFTERMATH
from kvbaton.cli.main import main
from kvbaton.control import key_room, keyring
from kvbaton.control.joining import admission_files as book
from kvbaton.control.joining.join_token import Membership
from kvbaton.control.key_room import fingerprint, report
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role


@pytest.fixture
def minted(tmp_path: Path) -> str:
    keyring.mint(tmp_path / "keys", ["router", "operator", "p0", "d0"])
    return str(tmp_path / "keys")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(["keys", *words])
    except SystemExit as left:
        status = int(str(left.code))
    out, err = capsys.readouterr()
    return status, out, err


def test_show_prints_names_fingerprints_and_no_secret(capsys: pytest.CaptureFixture[str], minted: str) -> None:
    ring = keyring.load(minted, "p0")
    later = time.time() + 600  # however long it takes from here to there
    os.utime(Path(minted) / "public" / "p0.json", (later, later))
    status, out, _ = call(capsys, "show", minted)
    assert status == 0
    assert f"p0        {fingerprint(ring.public)}  0 s old, secret here" in out
    assert "operator" in out and "may drain workers" in out
    assert "1 ticket keys\n" in out and "signs and verifies" in out
    assert ring.secret not in out and ring.ticket_keys[0].hex() not in out


def test_show_json_is_one_object(capsys: pytest.CaptureFixture[str], minted: str) -> None:
    status, out, _ = call(capsys, "show", minted, "--json")
    found = json.loads(out)
    assert status == 0 and {one["name"] for one in found["identities"]} == {"router", "operator", "p0", "d0"}
    assert found["problems"] == [] and [key["use"] for key in found["ticket_keys"]] == ["signs"]


def test_show_fails_with_what_is_wrong(capsys: pytest.CaptureFixture[str], minted: str) -> None:
    (Path(minted) / "secret" / "p0.json").chmod(0o644)
    status, out, _ = call(capsys, "show", minted)
    assert status == 1 and "problem: " in out and "has mode 0644: others could read it; chmod 600" in out


def test_tickets_are_rotated_in_two_commands_where_all_see_one_directory(
    capsys: pytest.CaptureFixture[str], minted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = keyring.load(minted, "p0").ticket_keys
    status, out, _ = call(capsys, "rotate", minted, "--tickets", "--settle-s", "0.01")
    assert status == 0 and "the new key signs" in out and "in 150 s: kvbaton keys rotate" in out
    new = keyring.load(minted, "p0").ticket_keys
    assert new[1:] == old
    status, _, err = call(capsys, "rotate", minted, "--tickets", "--finish")
    assert status == 2 and "finish after that" in err and keyring.load(minted, "p0").ticket_keys == new
    monkeypatch.setattr(key_room, "TICKETS_LIVE_S", 0.0)
    monkeypatch.setattr(key_room.finish_tickets, "__defaults__", (0.0, key_room.time.time))
    status, out, _ = call(capsys, "rotate", minted, "--tickets", "--finish")
    assert status == 0 and "1 old key is gone" in out and keyring.load(minted, "p0").ticket_keys == new[:1]


def test_tickets_are_rotated_in_three_where_files_are_copied(capsys: pytest.CaptureFixture[str], minted: str) -> None:
    old = keyring.load(minted, "p0").ticket_keys
    began = time.monotonic()
    status, out, _ = call(capsys, "rotate", minted, "--tickets", "--prepare")
    assert status == 0 and "a new key verifies; the old one signs" in out
    assert keyring.load(minted, "p0").ticket_keys[0] == old[0]
    status, out, _ = call(capsys, "rotate", minted, "--tickets", "--settle-s", "0.8")
    assert time.monotonic() - began > 0.7, "it was prepared just now, so not everybody may have it"
    assert status == 0 and keyring.load(minted, "p0").ticket_keys[1:] == old


def test_an_identity_is_rotated_and_finished(capsys: pytest.CaptureFixture[str], minted: str) -> None:
    old = keyring.load(minted, "p0").public
    status, out, _ = call(capsys, "rotate", minted, "p0")
    assert status == 0 and f"kvbaton keys rotate {minted} p0 --finish" in out
    assert keyring.load(minted, "d0").also == {"p0": (old,)}
    status, out, _ = call(capsys, "show", minted)
    assert f"being rotated: {fingerprint(old)} is accepted too" in out
    status, out, _ = call(capsys, "rotate", minted, "p0", "d0", "--finish")
    assert status == 0 and "p0: only its new key is accepted" in out and "d0: was not being rotated" in out
    assert keyring.load(minted, "d0").also == {}


def test_a_name_is_removed(capsys: pytest.CaptureFixture[str], minted: str) -> None:
    status, out, _ = call(capsys, "remove", minted, "d0")
    assert status == 0 and "removed d0" in out and "d0" not in keyring.load(minted, "p0").peers
    status, _, err = call(capsys, "remove", minted, "d0")
    assert status == 2 and "there is no d0; see: kvbaton keys show" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["rotate"], "give at least one, or --tickets"),
        (["add"], "give at least one"),
        (["show", "p0"], "show takes none"),
        (["add", "x", "--tickets"], "--tickets: only with rotate"),
        (["remove", "x", "--finish"], "--finish: only with rotate"),
        (["rotate", "p0", "--prepare"], "--prepare: only with rotate --tickets"),
        (["rotate", "--tickets", "--prepare", "--finish"], "without --finish"),
        (["add", "x", "x"], "given twice"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_touched(
    capsys: pytest.CaptureFixture[str], minted: str, words: list[str], part: str
) -> None:
    before = keyring.load(minted, "p0")
    status, _, err = call(capsys, words[0], minted, *words[1:])
    assert (status, part in err) == (2, True), err
    assert keyring.load(minted, "p0") == before


@pytest.mark.parametrize(("age_s", "said"), [(5, "5 s"), (125, "2 min"), (7300, "2 h"), (200_000, "2 d")])
def test_ages_are_told_in_the_unit_that_fits(
    capsys: pytest.CaptureFixture[str], minted: str, age_s: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = time.time()
    os.utime(Path(minted) / "public" / "p0.json", (then, then))
    monkeypatch.setattr(report, "__defaults__", (lambda: then + age_s,))
    assert f"{said} old" in call(capsys, "show", minted)[1]


def test_tokens_are_made_listed_and_revoked(capsys: pytest.CaptureFixture[str], minted: str, tmp_path: Path) -> None:
    out = tmp_path / "token"
    words = ("--role", "decode", "--expires", "2h", "--uses", "3", "--out", str(out), "--json")
    status, said, _ = call(capsys, "token", "new", minted, *words)
    made = json.loads(said)
    text = out.read_text().strip()
    assert status == 0 and text.startswith("kvbt1-") and text not in said and out.stat().st_mode & 0o777 == 0o600
    assert (made["role"], made["uses_max"], made["expires_s"]) == ("decode", 3, 7200.0)
    assert call(capsys, "token", "new", minted, "--out", str(out))[0] == 2  # nothing is overwritten
    status, said, _ = call(capsys, "token", "list", minted, "--json")
    assert [(each["id"], each["state"]) for each in json.loads(said)["tokens"]] == [(made["id"], "good")]
    joined = Membership(WorkerId("w1"), zmq.curve_keypair()[0].decode(), Role.DECODE, made["id"], 9**9)
    book.put_joined(Path(minted), joined, b"")
    status, said, _ = call(capsys, "token", "revoke", minted, made["id"], "--with-members")
    assert status == 0 and "removed w1; registries reject it within" in said
    assert AFTERMATH in said and f"kvbaton keys rotate {minted} --tickets" in said
    _, said, _ = call(capsys, "list", minted)
    assert f"{made['id']}  decode, revoked, 0 of 3 uses" in said and "0 joined" not in said
    status, said, _ = call(capsys, "token", "new", minted)
    assert status == 0 and said.splitlines()[-1].startswith("kvbt1-")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("token", "burn", "DIR"), "token new|list|revoke DIR"),
        (("token", "new"), "token new|list|revoke DIR"),
        (("token", "revoke", "DIR"), "argument ID"),
        (("token", "revoke", "DIR", "no-such"), "there is no token"),
        (("token", "list", "DIR", "x"), "argument ID"),
        (("token", "list", "DIR", "--uses", "3"), "--uses: not with token list"),
        (("token", "new", "DIR", "--with-members"), "--with-members: not with token new"),
        (("token", "new", "DIR", "--expires", "soon"), "--expires"),
        (("show", "DIR", "--role", "both"), "--role: only with token"),
    ],
)
def test_what_is_no_use_of_tokens_is_refused(
    capsys: pytest.CaptureFixture[str], minted: str, words: tuple[str, ...], named: str
) -> None:
    status, out, err = call(capsys, *(minted if word == "DIR" else word for word in words))
    assert status == 2 and named in err and not out
