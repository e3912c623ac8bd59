"""A key directory that changes under a running process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.control import key_files, key_room, keyring
from kvbaton.control.keyring import LOOK_S, Following, Keyring
from kvbaton.control.registry import RegistryServer
from kvbaton.control.zmq import ZmqControl
from tests.control.rig import Post, exchange, posted, repeat_until_answered, steady_bind, until


@pytest.fixture
def minted(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "cluster", ["p0", "d0", "router"])
    return tmp_path / "cluster"


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(keyring, "LOOK_S", 0.02)
    yield


class TestFollowing:
    def test_what_did_not_change_is_not_read_again(self, minted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        followed = Following(keyring.load(minted, "p0"), 0.0)
        assert followed.look(0.0) is None, "as it was loaded"
        monkeypatch.setattr(keyring, "reload", lambda _: pytest.fail("nothing changed"))
        assert followed.look(LOOK_S) is None
        assert followed.next_look == 2 * LOOK_S

    def test_what_changed_since_it_was_loaded_is_noticed_at_once(self, minted: Path) -> None:
        followed = Following(keyring.load(minted, "p0"), 0.0)
        keyring.add(minted, "d1")
        fresh = followed.look(0.0)
        assert fresh is not None and "d1" in fresh.peers and fresh is followed.keyring

    def test_a_directory_that_is_wrong_changes_nothing_and_is_said_once(
        self, minted: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        followed = Following(before := keyring.load(minted, "p0"), 0.0)
        followed.look(0.0)
        (minted / "public" / "d0.json").write_text("{")
        with caplog.at_level(logging.ERROR):
            assert [followed.look(now) for now in (2.0, 4.0, 6.0)] == [None] * 3
        said = [record for record in caplog.records if record.name == keyring.__name__]
        assert followed.keyring == before and len(said) == 1
        assert "stay as they were" in caplog.text and before.secret not in caplog.text
        key_room.rotate(minted, "router")
        (minted / "public" / "d0.json").unlink()
        fresh = followed.look(8.0)
        assert fresh is not None and "d0" not in fresh.peers and fresh.also.keys() == {"router"}

    def test_a_directory_that_is_gone_changes_nothing(self, minted: Path) -> None:
        followed = Following(keyring.load(minted, "p0"), 0.0)
        minted.rename(minted.parent / "moved")
        assert followed.look(0.0) is None and "d0" in followed.keyring.peers


def pair(minted: Path) -> tuple[Post, Post]:
    p0, d0 = Post(keyring.load(minted, "p0"), bind=steady_bind()), Post(keyring.load(minted, "d0"))
    d0.control.set_directory({p0.name: (p0.control.endpoint, "")})
    return p0, d0


@pytest.mark.usefixtures("_quick")
class TestLive:
    def test_who_is_removed_is_mute_and_cannot_be_told_anything(self, minted: Path) -> None:
        p0, d0 = pair(minted)
        with posted(p0, d0):
            exchange(d0, p0)
            key_room.remove(minted, "d0")
            until(lambda: p0.control.counters["keys_changed"], p0)
            p0.inbox.clear()
            refused = p0.control.counters["refused"]
            d0.send(p0, b"still here")
            until(lambda: p0.control.counters["refused"] > refused, p0, d0)
            assert p0.inbox == [] and not p0.send(d0, b"nothing for you")

    def test_who_is_added_is_let_in(self, minted: Path) -> None:
        p0, d0 = pair(minted)
        with posted(p0, d0):
            keyring.add(minted, "d1")
            d1 = Post(keyring.load(minted, "d1"))
            with posted(d1):
                d1.control.set_directory({p0.name: p0.address})
                until(lambda: p0.control.counters["keys_changed"], p0)
                exchange(d1, p0)

    def test_a_caller_is_rotated_without_a_pause(self, minted: Path) -> None:
        p0, d0 = pair(minted)
        with posted(p0, d0):
            exchange(d0, p0)
            key_room.rotate(minted, "d0")
            until(lambda: p0.control.counters["keys_changed"], p0, d0)
            exchange(d0, p0)  # the process before, with its old secret
            again = Post(keyring.load(minted, "d0"))
            with posted(again):
                again.control.set_directory({p0.name: (p0.control.endpoint, "")})
                exchange(again, p0)
                key_room.finish(minted, "d0")
                until(lambda: p0.control.counters["keys_changed"] == 2, p0, again)
                exchange(again, p0)
                p0.inbox.clear()
                refused = p0.control.counters["refused"]
                d0.send(p0, b"the old key")
                until(lambda: p0.control.counters["refused"] > refused, p0, d0)
                assert p0.inbox == []

    def test_a_callee_is_found_under_whichever_key_it_has(self, minted: Path) -> None:
        p0, d0 = pair(minted)
        with posted(d0):
            key_room.rotate(minted, "p0")
            until(lambda: d0.control.counters["keys_changed"], d0)
            with posted(p0):
                repeat_until_answered(d0, p0)  # it was not restarted: the first key that is tried is the wrong one
            again = Post(keyring.load(minted, "p0"), bind=p0.control.endpoint)
            with posted(again):
                repeat_until_answered(d0, again)
                key_room.finish(minted, "p0")
                until(lambda: d0.control.counters["keys_changed"] == 2, d0, again)
                repeat_until_answered(d0, again)

    def test_ticket_keys_reach_whoever_wants_to_know(self, minted: Path) -> None:
        heard: list[Keyring] = []
        control = ZmqControl(keyring.load(minted, "p0"))
        control.on_keys = heard.append
        key_room.prepare_tickets(minted)
        until(lambda: control.wait(0.01) or heard)
        assert len(heard[-1].ticket_keys) == 2
        control.close()

    def test_a_wait_without_a_limit_looks_too_and_goes_on_waiting(self, minted: Path) -> None:
        control = ZmqControl(keyring.load(minted, "p0"))
        control.on_keys = lambda _: control.wake()
        keyring.add(minted, "d1")
        control.wait(None)
        assert control.counters["keys_changed"] == 1
        control.close()

    def test_a_registry_tells_when_its_keys_changed(self, minted: Path) -> None:
        heard: list[Keyring] = []
        server = RegistryServer(keyring.load(minted, "router"))
        server.on_keys = heard.append
        server.start()
        try:
            key_room.prepare_tickets(minted)
            until(lambda: heard)
        finally:
            server.close()


def test_stamps_tell_files_that_were_replaced_edited_and_removed(minted: Path) -> None:
    stamps = [key_files.stamp(minted)]
    key_room.rotate(minted, "p0")
    stamps.append(key_files.stamp(minted))
    with open(minted / "public" / "d0.json", "a") as file:
        file.write("\n")
    stamps.append(key_files.stamp(minted))
    key_room.prepare_tickets(minted)
    stamps.append(key_files.stamp(minted))
    key_room.remove(minted, "router")
    stamps.append(key_files.stamp(minted))
    assert len(set(stamps)) == 5
