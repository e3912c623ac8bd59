from __future__ import annotations

import json
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvbaton.control import key_files, key_room, keyring
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_token import JoinToken, token_from
from kvbaton.protocol.ids import WorkerId


@pytest.fixture
def minted(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "cluster", ["p0", "d0", "router"])
    return tmp_path / "cluster"


def _rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_minted_identity_loads_with_its_keys_and_those_of_its_peers(minted: Path) -> None:
    p0, d0 = keyring.load(minted, "p0"), keyring.load(minted, "d0")
    assert set(p0.peers) == {"p0", "d0", "router"}
    assert p0.peers == d0.peers and p0.peers[d0.name] == d0.public
    assert zmq.curve_public(p0.secret.encode()).decode() == p0.public
    assert p0.ticket_keys == d0.ticket_keys and len(p0.ticket_keys[0]) == keyring.TICKET_KEY_BYTES


def test_nothing_that_is_minted_can_be_read_by_others(minted: Path) -> None:
    for path in [minted, *minted.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_modes_hold_under_a_permissive_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keyring.mint(tmp_path / "cluster", ["p0"])
        keyring.add(tmp_path / "cluster", "p1")
    finally:
        os.umask(before)
    for path in (tmp_path / "cluster").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_minting_over_a_cluster_is_refused_and_leaves_it_as_it_was(minted: Path) -> None:
    before = {path: path.read_bytes() for path in minted.rglob("*.json")}
    with pytest.raises(ControlError, match="exists; add identities"):
        keyring.mint(minted, ["p0"])
    assert {path: path.read_bytes() for path in minted.rglob("*.json")} == before
    assert [path.name for path in minted.parent.iterdir()] == ["cluster"]


def test_minting_over_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster").write_text("precious")
    with pytest.raises(ControlError, match="exists"):
        keyring.mint(tmp_path / "cluster", ["p0"])
    assert (tmp_path / "cluster").read_text() == "precious"


@pytest.mark.parametrize("name", ["", "../p0", "a/b", "p 0", "x" * 65, ".hidden", "p0#1"])
def test_a_name_that_is_no_worker_id_is_refused(minted: Path, name: str) -> None:
    with pytest.raises(ControlError, match="name: got"):
        keyring.mint(minted.parent / "other", [name])
    with pytest.raises(ControlError, match="name: got"):
        keyring.add(minted, name)
    with pytest.raises(ControlError, match="name: got"):
        keyring.load(minted, name)
    assert not (minted.parent / "other").exists()


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="repeats one"):
        keyring.mint(tmp_path / "cluster", ["p0", "p0"])


def test_an_added_identity_is_known_to_all_and_changes_no_other(minted: Path) -> None:
    before = keyring.load(minted, "p0")
    keyring.add(minted, "d1")
    after, d1 = keyring.load(minted, "p0"), keyring.load(minted, "d1")
    assert after.secret == before.secret and after.ticket_keys == before.ticket_keys
    assert dict(after.peers) == {**before.peers, d1.name: d1.public}


def test_adding_a_name_that_exists_is_refused(minted: Path) -> None:
    before = keyring.load(minted, "p0")
    with pytest.raises(ControlError, match="there is a p0 already"):
        keyring.add(minted, "p0")
    assert keyring.load(minted, "p0") == before


@pytest.mark.parametrize("name", ["d1", "d2", "d3"])
def test_of_many_who_add_one_name_at_once_one_succeeds(
    minted: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[str] = []
    together, write = threading.Barrier(4), key_files.write

    def write_and_meet(path: Path, content: key_files.Public | key_files.Secret | key_files.Tickets) -> None:
        write(path, content)
        if path.parent.name == "secret":
            with suppress(threading.BrokenBarrierError):  # as it should be: one at a time gets here
                together.wait(0.1)

    def attempt() -> None:
        try:
            keyring.add(minted, name)
            outcomes.append("added")
        except ControlError:
            outcomes.append("refused")

    monkeypatch.setattr(key_files, "write", write_and_meet)
    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["added"] + ["refused"] * 3
    assert keyring.load(minted, name).name == name


def test_a_file_that_exists_is_never_overwritten(minted: Path) -> None:
    path = minted / "public" / "p0.json"
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        key_files.write(path, key_files.Public("p0", "x" * 40))
    assert path.read_bytes() == before
    assert sorted(file.name for file in path.parent.glob("*.json")) == ["d0.json", "p0.json", "router.json"]


def test_an_interrupted_add_can_be_repeated(minted: Path) -> None:
    keyring.add(minted, "d1")
    (minted / "public" / "d1.json").unlink()
    keyring.add(minted, "d1")
    assert keyring.load(minted, "d1").name == "d1"


def test_a_cluster_that_is_not_there_is_named_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="none: no key directory; mint one"):
        keyring.load(tmp_path / "none", "p0")
    with pytest.raises(ControlError, match="none: no key directory; mint one"):
        keyring.add(tmp_path / "none", "p0")


@pytest.mark.parametrize("file", ["secret/p0.json", "tickets.json"])
def test_a_missing_file_is_named_with_the_next_step(minted: Path, file: str) -> None:
    (minted / file).unlink()
    with pytest.raises(ControlError, match=f"{file} is missing; add that identity, or copy"):
        keyring.load(minted, "p0")


@pytest.mark.parametrize("file", ["secret/p0.json", "tickets.json"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused(minted: Path, file: str, mode: int) -> None:
    (minted / file).chmod(mode)
    with pytest.raises(ControlError, match=f"mode {mode:04o}: others could read it; chmod 600"):
        keyring.load(minted, "p0")


def as_kubernetes_mounts(minted: Path, mount: Path, mode: int) -> Path:
    """A key directory of projected volumes: each file a link through `..data` into a folder of its version, root's."""
    for part, names in {
        "public": sorted(path.name for path in (minted / "public").iterdir()),
        "secret": ["p0.json"],
        ".": ["tickets.json"],
    }.items():
        version = mount / part / "..2026_11_17_12_00_00.123"
        version.mkdir(parents=True)
        (mount / part / "..data").symlink_to(version.name)
        for name in names:
            (version / name).write_bytes((minted / part / name).read_bytes())
            (version / name).chmod(0o644 if part == "public" else mode)
            (mount / part / name).symlink_to(f"..data/{name}")
    return mount


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files that are root's")
@pytest.mark.parametrize(
    ("mode", "user", "good"),
    [(0o440, 10001, True), (0o400, 0, True), (0o440, 0, False), (0o444, 10001, False), (0o460, 10001, False)],
)
def test_a_secret_that_root_gave_to_the_group_of_another_user_is_taken(
    minted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, user: int, good: bool
) -> None:
    mount = as_kubernetes_mounts(minted, tmp_path / "mount", mode)
    token = tmp_path / "token"
    token.write_text(JoinToken.new(zmq.curve_keypair()[0].decode()).text)
    token.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = [opening.found for opening in key_files.openings(mount) if "others could read" in opening.found]
    if good:
        assert keyring.load(mount, "p0").name == "p0" and not found
        assert token_from(str(token)) is not None
    else:
        for read in (lambda: keyring.load(mount, "p0"), lambda: token_from(str(token))):
            with pytest.raises(ControlError, match=f"mode {mode:04o}: others could read it"):
                read()
        assert len(found) == 2, "its own secret, and the ticket keys"


@pytest.mark.parametrize(
    ("file", "fields", "part"),
    [
        ("secret/p0.json", {"secret": 7}, r"\$\.secret"),
        ("secret/p0.json", {"secret": "short"}, r"\$\.secret"),
        ("secret/p0.json", {"secret": "~" * 40}, "secret: not a Z85 key"),
        ("secret/p0.json", {"extra": 1}, "extra"),
        ("public/d0.json", {"public": "~" * 40}, "public: not a Z85 key"),
        ("public/d0.json", {"name": "p0"}, "name: got 'p0', expected 'd0'"),
        ("tickets.json", {"keys": []}, r"\$\.keys"),
        ("tickets.json", {"keys": ["00"]}, r"\$\.keys\[0\]"),
        ("tickets.json", {"keys": ["0" * 64] * 9}, r"\$\.keys"),
    ],
)
def test_a_malformed_file_is_refused_by_the_name_of_its_field(
    minted: Path, file: str, fields: dict[str, object], part: str
) -> None:
    _rewrite(minted / file, **fields)
    with pytest.raises(ControlError, match=part) as caught:
        keyring.load(minted, "p0")
    assert Path(file).name in str(caught.value)


def test_a_file_that_is_not_json_or_far_too_long_is_refused(minted: Path) -> None:
    (minted / "secret" / "p0.json").write_bytes(b"\x80\x04\x95 pickle?")
    with pytest.raises(ControlError, match="restore the file"):
        keyring.load(minted, "p0")
    (minted / "secret" / "p0.json").write_bytes(b" " * (keyring.FILE_BYTES_MAX + 1))
    with pytest.raises(ControlError, match="bytes; restore the file"):
        keyring.load(minted, "p0")


def test_two_names_with_one_key_are_refused(minted: Path) -> None:
    _rewrite(minted / "public" / "d0.json", public=keyring.load(minted, "p0").public)
    with pytest.raises(ControlError, match="another identity has this key"):
        keyring.load(minted, "p0")


def test_a_public_key_that_is_not_the_secrets_is_refused(minted: Path) -> None:
    _rewrite(minted / "public" / "p0.json", public=zmq.curve_keypair()[0].decode())
    with pytest.raises(ControlError, match="does not belong to its secret"):
        keyring.load(minted, "p0")


def test_ticket_keys_can_be_rotated_by_putting_a_new_one_first(minted: Path) -> None:
    old = keyring.load(minted, "p0").ticket_keys
    _rewrite(minted / "tickets.json", keys=["ab" * 32, old[0].hex()])
    assert keyring.load(minted, "p0").ticket_keys == (b"\xab" * 32, *old)


def test_no_secret_shows_in_a_repr_or_an_error(minted: Path) -> None:
    ring = keyring.load(minted, "p0")
    told = f"{ring!r} {ring} {ring.__rich_repr__()} {[ring]}"
    _rewrite(minted / "public" / "p0.json", public=zmq.curve_keypair()[0].decode())
    with pytest.raises(ControlError) as caught:
        keyring.load(minted, "p0")
    for secret in (ring.secret, ring.ticket_keys[0].hex(), str(ring.ticket_keys[0])):
        assert secret not in told + str(caught.value)


def test_a_key_is_for_what_its_file_says_or_its_name(tmp_path: Path) -> None:
    keyring.mint(tmp_path / "cluster", ["p0:prefill", "p0.1", "d0:decode", "router", "operator-a", "w", "w.1"])
    for rank in ("p0.dp0", "p0.dp0.1", "d0.dp1:both"):
        keyring.add(tmp_path / "cluster", rank)
    keyring.add(tmp_path / "cluster", "s:store")
    found = keyring.load(tmp_path / "cluster", "p0")
    names = ("p0", "p0.1", "d0", "router", "operator-a", "w", "w.1", "s", "unknown")
    ranks = ("p0.dp0", "p0.dp0.1", "d0.dp1", "d0.dp1.2", "p0.dpx", "router.dp0")
    assert [found.role_of(WorkerId(name)).value for name in ranks] == [
        "prefill", "prefill", "both", "both", "both", "both",
    ], "a rank's key is for what its engine's is, unless its own file says more"  # fmt: skip
    assert [found.role_of(WorkerId(name)).value for name in names] == [
        "prefill", "prefill", "decode", "router", "operator", "both", "both", "store", "both",
    ]  # fmt: skip
    key_room.rotate(tmp_path / "cluster", "d0")
    key_room.finish(tmp_path / "cluster", "d0")
    assert keyring.reload(found).role_of(WorkerId("d0")).value == "decode"
    with pytest.raises(ControlError, match="role of x: got 'king', expected one of prefill"):
        keyring.add(tmp_path / "cluster", "x:king")
