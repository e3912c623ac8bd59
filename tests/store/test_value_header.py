"""Frames: a value is good only for the key it was sealed for, at its length, with every bit as it was, from a writer
that is trusted now and that took from nobody who was removed."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.control.signing import Signer
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store import value_header
from kvbaton.store.value_header import (
    ALONE,
    DIGESTS,
    FRAME_BYTES,
    ORIGINS_MAX,
    StoreTrust,
    claimed,
    held,
    seal_all,
    writer_id,
    writers_of,
)

SIZE = 40
P0, P1 = writer_id("p0 key"), writer_id("p1 key")
LIAR, OTHER = b"liar....", b"other..."


def signer(number: int) -> Signer:
    return Signer.from_private(bytes([number]) * 32)


def trust(me: bytes = P0, number: int = 1, **changes: object) -> StoreTrust:
    writers = {P0: (signer(1).public,), P1: (signer(2).public,)}
    told = RankStoreTrust(me, signer(number).private, writers)
    return msgspec.structs.replace(told, **changes).trust


def sealed(*keys: str, by: StoreTrust = ALONE, origins: tuple[bytes, ...] = ()) -> list[memoryview]:
    frames = [memoryview(bytearray(FRAME_BYTES + SIZE)) for _ in keys]
    for index, frame in enumerate(frames):
        frame[FRAME_BYTES:] = bytes([index + 1]) * SIZE
    seal_all(frames, keys, origins, by)
    return frames


def test_a_sealed_frame_holds_its_value() -> None:
    [frame] = sealed("key")
    assert held(frame, "key", ALONE) == (ALONE.me,)


def test_of_another_key_or_length_it_holds_nothing() -> None:
    [frame] = sealed("other")
    assert held(frame, "key", ALONE) is None
    assert held(sealed("key")[0][:-1], "key", ALONE) is None
    assert held(memoryview(bytes(FRAME_BYTES)), "key", ALONE) is None
    assert held(memoryview(bytes(FRAME_BYTES + SIZE)), "key", ALONE) is None


def test_a_change_of_any_bit_is_noticed() -> None:
    frame = sealed("a", "key", "c", origins=(LIAR, OTHER))[1]
    for index in range(len(frame)):
        frame[index] ^= 1 << index % 8
        assert held(frame, "key", ALONE) is None, f"byte {index}"
        frame[index] ^= 1 << index % 8
    assert held(frame, "key", ALONE) == (ALONE.me, LIAR, OTHER)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_one_signature_is_of_a_whole_batch_and_each_value_stands_alone(count: int) -> None:
    signed = []
    by = trust()
    by = StoreTrust(
        by.me, lambda root: signed.append(root) or signer(1).sign("store value", root), by.writers, by.check
    )
    keys = [f"key{number}" for number in range(count)]
    frames = sealed(*keys, by=by)
    assert len(signed) == 1
    assert all(held(frame, key, trust(P1, 2)) == (P0,) for frame, key in zip(frames, keys, strict=True))
    if count > 1:
        assert held(frames[0], keys[1], trust()) is None


def test_the_values_of_a_batch_are_checked_with_one_signature_and_a_node_or_two_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [f"key{number}" for number in range(64)]
    frames, checked, nodes, proven = sealed(*keys, by=trust()), [], [], set[bytes]()
    node, asked = value_header._node, trust()
    monkeypatch.setattr(value_header, "_node", lambda *both: nodes.append(1) or node(*both))
    counting = StoreTrust(asked.me, None, asked.writers, lambda *told: checked.append(1) or asked.check(*told))
    assert all(claimed(frame, key, counting, proven) for frame, key in zip(frames, keys, strict=True))
    assert (len(checked), len(nodes)) == (1, 63)
    [forged] = sealed("key1", by=trust(P0, 2))
    forged[value_header._PLACE : value_header._ORIGINS] = frames[1][value_header._PLACE : value_header._ORIGINS]
    assert claimed(forged, "key1", asked, proven) is None, "what is proven vouches for no other value"


def test_nobody_writes_in_anothers_name() -> None:
    [forged] = sealed("key", by=trust(P0, 2))
    assert held(forged, "key", trust()) is None


def test_a_value_put_under_an_honest_writers_header_is_no_value() -> None:
    """What a liar can do with the honest value's header: nothing."""
    [honest], [false] = sealed("key", by=trust()), sealed("key", by=trust(P1, 2))
    false[FRAME_BYTES:] = b"\x07" * SIZE
    false[:FRAME_BYTES] = honest[:FRAME_BYTES]
    assert held(false, "key", trust()) is None


def test_a_writer_that_is_no_member_any_more_is_not_believed() -> None:
    [frame] = sealed("key", by=trust(P1, 2))
    assert held(frame, "key", trust()) == (P1,)
    assert held(frame, "key", trust(writers={P0: (signer(1).public,)})) is None


def test_a_value_computed_on_kv_of_a_removed_member_is_not_believed() -> None:
    [frame] = sealed("key", by=trust(), origins=(LIAR,))
    assert held(frame, "key", trust()) == (P0, LIAR)
    assert held(frame, "key", trust(gone=(LIAR,))) is None
    assert held(frame, "key", trust(gone=(OTHER,))) is not None


def test_who_may_not_grant_seals_nothing() -> None:
    with pytest.raises(PermissionError, match="does not allow it to grant"):
        sealed("key", by=trust(private=b""))
    with pytest.raises(PermissionError, match="origins: 85 members"):
        sealed("key", origins=(LIAR,) * (ORIGINS_MAX + 1))
    assert held(sealed("key", origins=(OTHER,) * ORIGINS_MAX)[0], "key", ALONE) is not None


def test_where_the_fast_digest_is_missing_its_values_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [memoryview(bytearray(FRAME_BYTES + SIZE)) for _ in range(2)]
    for frame, kind in zip(frames, (1, max(DIGESTS)), strict=True):
        seal_all([frame], ["key"], (), ALONE, kind)
    monkeypatch.setattr(value_header, "DIGESTS", {1: DIGESTS[1]})
    assert held(frames[0], "key", ALONE) is not None
    assert max(DIGESTS) == 1 or held(frames[1], "key", ALONE) is None


def test_a_header_tells_its_writers_without_the_value() -> None:
    [frame] = sealed("key", by=trust(), origins=(LIAR,))
    assert writers_of(bytes(frame[:FRAME_BYTES])) == (P0, LIAR)
    assert writers_of(b"KVBS") == writers_of(bytes(FRAME_BYTES)) == ()
    assert "private" not in repr(RankStoreTrust(P0, b"x" * 32, {}))
