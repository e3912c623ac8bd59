"""New keys for old: at no stage is a good peer or a good ticket refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from kvbaton.control import key_files, key_room, keyring
from kvbaton.control.addressing import ControlError
from kvbaton.control.key_room import fingerprint, report


@pytest.fixture
def minted(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "cluster", ["p0", "d0", "router", "operator"])
    return tmp_path / "cluster"


class TestTickets:
    def test_a_key_verifies_before_it_signs_and_after_it_signed(self, minted: Path) -> None:
        old = keyring.load(minted, "p0").ticket_keys
        assert key_room.prepare_tickets(minted)
        prepared = keyring.load(minted, "p0").ticket_keys
        assert prepared[0] == old[0] and len(prepared) == 2
        key_room.promote_tickets(minted, wall=lambda: 1000.0)
        promoted = keyring.load(minted, "p0").ticket_keys
        assert promoted == (prepared[1], old[0])
        assert key_room.finish_tickets(minted, wall=lambda: 1000.0 + key_room.TICKETS_LIVE_S) == 1
        assert keyring.load(minted, "p0").ticket_keys == (prepared[1],)

    def test_finishing_waits_for_what_the_old_key_signed(self, minted: Path) -> None:
        key_room.prepare_tickets(minted)
        key_room.promote_tickets(minted, wall=lambda: 1000.0)
        with pytest.raises(ControlError, match="may live for another 100 s; finish after that"):
            key_room.finish_tickets(minted, live_s=150.0, wall=lambda: 1050.0)
        assert len(keyring.load(minted, "p0").ticket_keys) == 2

    def test_preparing_twice_is_preparing_once(self, minted: Path) -> None:
        assert key_room.prepare_tickets(minted)
        before = keyring.load(minted, "p0").ticket_keys
        assert not key_room.prepare_tickets(minted)
        assert keyring.load(minted, "p0").ticket_keys == before

    def test_there_must_be_something_to_promote(self, minted: Path) -> None:
        with pytest.raises(ControlError, match="no key that was prepared"):
            key_room.promote_tickets(minted)

    def test_the_keys_are_bounded(self, minted: Path) -> None:
        for _ in range(key_files.TICKET_KEYS_MAX - 1):
            key_room.prepare_tickets(minted)
            key_room.promote_tickets(minted)
        with pytest.raises(ControlError, match="holds 8 keys, the most; finish"):
            key_room.prepare_tickets(minted)

    def test_finishing_without_a_rotation_changes_nothing(self, minted: Path) -> None:
        before = keyring.load(minted, "p0").ticket_keys
        assert key_room.finish_tickets(minted) == 0
        assert keyring.load(minted, "p0").ticket_keys == before

    def test_the_file_stays_private(self, minted: Path) -> None:
        key_room.prepare_tickets(minted)
        key_room.promote_tickets(minted)
        assert (minted / "tickets.json").stat().st_mode & 0o777 == 0o600


class TestIdentities:
    def test_the_old_key_is_let_in_until_it_is_finished(self, minted: Path) -> None:
        old = keyring.load(minted, "p0")
        key_room.rotate(minted, "p0")
        new = keyring.load(minted, "p0")
        assert new.secret != old.secret and new.peers["p0"] == new.public != old.public
        assert new.also == {"p0": (old.public,)}
        assert keyring.reload(old).also == new.also and keyring.reload(old).secret == old.secret
        assert key_room.finish(minted, "p0")
        assert keyring.load(minted, "p0").also == {}
        assert not key_room.finish(minted, "p0")

    def test_a_second_rotation_waits_for_the_first(self, minted: Path) -> None:
        key_room.rotate(minted, "p0")
        with pytest.raises(ControlError, match="p0 is being rotated; restart it, then finish"):
            key_room.rotate(minted, "p0")

    def test_a_rotation_that_was_broken_off_can_be_repeated(self, minted: Path) -> None:
        old = keyring.load(minted, "p0")
        lost = zmq.curve_keypair()[0].decode()
        key_files.replace(minted / "public" / "p0.json", key_files.Public("p0", lost, (old.public,)))
        assert keyring.load(minted, "p0").public == old.public, "it can be started in between"
        with pytest.raises(ControlError, match="still the old one"):
            key_room.finish(minted, "p0")
        key_room.rotate(minted, "p0")
        assert keyring.load(minted, "p0").also == {"p0": (old.public,)}

    def test_it_is_done_where_the_secret_is(self, minted: Path) -> None:
        (minted / "secret" / "p0.json").unlink()
        with pytest.raises(ControlError, match=r"secret/p0\.json is not here"):
            key_room.rotate(minted, "p0")

    def test_a_secret_of_somebody_else_is_not_replaced(self, minted: Path) -> None:
        key_files.replace(minted / "public" / "p0.json", key_files.Public("p0", zmq.curve_keypair()[0].decode()))
        with pytest.raises(ControlError, match="does not belong to its secret"):
            key_room.rotate(minted, "p0")

    def test_elsewhere_it_can_be_finished(self, minted: Path) -> None:
        key_room.rotate(minted, "p0")
        (minted / "secret" / "p0.json").unlink()
        assert key_room.finish(minted, "p0")

    @pytest.mark.parametrize("action", [key_room.rotate, key_room.finish, key_room.remove])
    def test_an_unknown_name_is_named(self, minted: Path, action: object) -> None:
        with pytest.raises(ControlError, match="there is no x9; see: kvbaton keys show"):
            action(minted, "x9")  # type: ignore[operator]

    def test_who_is_removed_is_gone_with_its_secret(self, minted: Path) -> None:
        key_room.remove(minted, "d0")
        assert "d0" not in keyring.load(minted, "p0").peers
        assert not (minted / "secret" / "d0.json").exists()
        key_room.remove(minted, "p0")

    def test_an_old_key_that_another_has_is_refused(self, minted: Path) -> None:
        p0, d0 = keyring.load(minted, "p0"), keyring.load(minted, "d0")
        key_files.replace(minted / "public" / "d0.json", key_files.Public("d0", d0.public, (p0.public,)))
        with pytest.raises(ControlError, match="another identity has this key"):
            keyring.load(minted, "p0")


class TestReport:
    def test_names_and_fingerprints_but_no_secret(self, minted: Path) -> None:
        ring = keyring.load(minted, "p0")
        key_room.rotate(minted, "d0")
        key_room.prepare_tickets(minted)
        (minted / "secret" / "router.json").unlink()
        found = report(minted)
        shown = {one.name: one for one in found.identities}
        assert shown["p0"].fingerprint == fingerprint(ring.public) and shown["p0"].secret_here
        assert len(shown["d0"].also) == 1 and shown["operator"].may_drain and not shown["router"].secret_here
        assert [key.use for key in found.ticket_keys] == ["signs", "next"]
        assert found.problems == ()
        text = repr(found)
        assert ring.secret not in text and ring.ticket_keys[0].hex() not in text and ring.public not in text

    def test_problems_are_told_all_at_once(self, minted: Path) -> None:
        (minted / "secret" / "p0.json").chmod(0o644)
        (minted / "public" / "d0.json").write_text("{}")
        key_files.write(minted / "secret" / "gone.json", key_files.Secret("gone", zmq.curve_keypair()[1].decode()))
        key_files.replace(minted / "public" / "router.json", key_files.Public("x", zmq.curve_keypair()[0].decode()))
        other = key_files.Public("operator", keyring.files.cards(Path(_fresh(minted)))[0].public)
        key_files.replace(minted / "public" / "operator.json", other)
        os.chmod(minted, 0o777)
        told = "\n".join(report(minted).problems)
        for part in (
            "secret/p0.json has mode 0644", "public/d0.json: ", "no public/gone.json", "name: got 'x'",
            "secret/operator.json does not belong", "can be written by everybody",
        ):  # fmt: skip
            assert part in told, told

    @pytest.mark.parametrize(
        ("path", "mode", "said", "fix"),
        [
            ("public", 0o777, "written by everybody: writing a public file grants access", "chmod 700"),
            ("public", 0o1777, "written by everybody: writing a public file grants access", "chmod 700"),
            ("public", 0o770, "written by its group: writing a public file grants access", "chmod 700"),
            ("secret", 0o722, "written by everybody", "chmod 700"),
            (".", 0o720, "written by its group", "chmod 700"),
            ("..", 0o777, "written by everybody: they could replace the directory", "chmod go-w"),
            ("public/p0.json", 0o666, "written by everybody: they could get access by this name", "chmod go-w"),
            ("public/p0.json", 0o620, "written by its group: they could get access by this name", "chmod go-w"),
            ("tickets.json", 0o640, "has mode 0640: others could read it", "chmod 600"),
            ("tickets.json.bak", 0o644, "has mode 0644: others could read it", "chmod 600"),
            ("secret/.p0.json.0123", 0o604, "has mode 0604: others could read it", "chmod 600"),
            ("secret/gone.json~", 0o660, "has mode 0660: others could read it", "chmod 600"),
        ],
    )
    def test_whom_the_file_system_lets_in_is_a_problem(
        self, minted: Path, path: str, mode: int, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(key_files, "_is_own_group", lambda _: False)
        target = minted.parent if path == ".." else minted / path
        if not target.exists():
            target.write_text("{}")
            target.chmod(0o600)
        assert report(minted).problems == ()
        target.chmod(mode)
        (told,) = report(minted).problems
        assert told.startswith(f"{target} ") and said in told and fix in told.rpartition("; ")[2]

    def test_what_nobody_else_gets_at_is_no_problem(self, minted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        minted.parent.chmod(0o1777)  # as /tmp: sticky
        (minted / "public").chmod(0o755)
        (minted / "public" / "p0.json").chmod(0o644)
        monkeypatch.setattr(key_files, "_is_own_group", lambda _: True)
        minted.chmod(0o770)
        assert report(minted).problems == ()

    def test_a_file_of_another_user_is_a_problem_and_a_read_only_mount_is_not(
        self, minted: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Path.stat

        def owned(path: Path, **words: bool) -> os.stat_result:
            told = real(path, **words)
            return os.stat_result([*told[:4], 4242, *told[5:10]]) if path.name == "d0.json" else told

        monkeypatch.setattr(Path, "stat", owned)
        assert any("public/d0.json belongs to user 4242" in each for each in report(minted).problems)
        monkeypatch.setattr(Path, "stat", real)
        (minted / "public").chmod(0o777)
        vfs = os.statvfs(minted)
        flagged = os.statvfs_result([*vfs[:8], vfs.f_flag | os.ST_RDONLY, vfs[9]])
        monkeypatch.setattr(os, "statvfs", lambda _: flagged)
        assert report(minted).problems == ()

    def test_a_rotation_that_was_broken_off_and_keys_that_two_have_are_problems(self, minted: Path) -> None:
        p0 = keyring.load(minted, "p0").public
        key_files.replace(minted / "public" / "p0.json", key_files.Public("p0", zmq.curve_keypair()[0].decode(), (p0,)))
        key_files.replace(minted / "public" / "d0.json", key_files.Public("d0", p0))
        (minted / "tickets.json").unlink()
        told = "\n".join(report(minted).problems)
        for part in ("still the old one of a rotation", "has this key too", "tickets.json is missing"):
            assert part in told, told


def _fresh(minted: Path) -> Path:
    keyring.mint(minted.parent / "other", ["a"])
    return minted.parent / "other"
