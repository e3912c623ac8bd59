"""The late-data test, on every data plane: a peer that is stopped in the middle of a read and goes on much later.

The handoff fails by its deadline, the engine reuses every block that it has free, the peer goes on: not one byte lands
in a block that was free, what was quarantined comes back, and the next handoff over the same plane is delivered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import RequestId
from tests.e2e.transports.late_peer import BLOCKS, PAGE_BYTES, Reader, Source, contents, source_and_reader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MARK, MARKS = 0xEE, 0xEEEE_EEEE_EEEE_EEEE
"""What an engine writes into blocks that it uses again; no byte of the source is like it."""

PROMPT_BLOCKS = 1024
NEXT_BLOCKS = 64
TRIES = 10
FIRST_BYTE_S = 10.0
LOOK_S = 0.0002


class Moment(msgspec.Struct, frozen=True):
    """What is to be seen while the source is stopped."""

    waiting: tuple[str, ...] = ("copying",)  # what the reader does, in vain, when its deadline comes
    quarantined: bool = False  # nothing can be cancelled, so the blocks stay out of use


QUARANTINED = Moment(quarantined=True)
OFFERED = Moment(("offered",))
GOES_ON = Moment(("copying", "committing"))


class Story(msgspec.Struct, frozen=True):
    """One data plane."""

    plane: str
    first: Moment = Moment()  # stopped before any byte has landed; the two planes have not met before
    later: Moment = Moment()  # stopped when the first bytes have landed
    alone: bool = False  # once they have met, a read goes on without the source's own process
    push: bool = False
    env: tuple[tuple[str, str], ...] = ()


STORIES = {
    "shm": Story("shm", GOES_ON, GOES_ON, alone=True),
    "tcp": Story("tcp"),
    "tcp, pushed": Story("tcp", OFFERED, OFFERED, push=True),
    "nixl": Story("nixl", QUARANTINED, GOES_ON, alone=True),  # UCX reads the memory of a process of this host
    "nixl over tcp": Story("nixl", QUARANTINED, QUARANTINED, env=(("UCX_TLS", "tcp"),)),
    "mooncake": Story("mooncake"),
}


@pytest.mark.parametrize(
    "story", [pytest.param(story, id=name, marks=pytest.mark.library(story.plane)) for name, story in STORIES.items()]
)
def test_nothing_lands_in_reused_blocks(story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in story.env:
        monkeypatch.setenv(name, value)
    rng = random.Random(5)
    from_blocks, to_blocks = (rng.sample(range(BLOCKS), PROMPT_BLOCKS) for _ in range(2))
    with source_and_reader(tmp_path, story.plane) as (source, reader):
        request = reader.claim(source, from_blocks, push=story.push)
        source.stop()
        reader.load(request, to_blocks)
        _nothing_lands(story.first, source, reader, request)
        _the_next_is_delivered(source, reader, rng)

        request = _caught_half_way(story, source, reader, from_blocks, to_blocks)
        _nothing_lands(story.later, source, reader, request)
        _the_next_is_delivered(source, reader, rng)
        assert all(len(ends) == 1 for ends in reader.reports.values())


def _nothing_lands(moment: Moment, source: Source, reader: Reader, request: RequestId) -> None:
    """The source is stopped while it should hand `request` over; it goes on when all that is free has been reused."""
    blocks = reader.held.get(request, ())
    end = reader.end_of(request)
    assert end.reason is Reason.TRANSFER_TIMEOUT
    assert end.detail in [f"waited too long while {waiting}" for waiting in moment.waiting]
    if moment.quarantined:
        assert reader.held == {request: blocks} and reader.quarantined == PROMPT_BLOCKS
    else:
        reader.until(lambda: not reader.held)  # the source, which is stopped, is not needed for it
    reused = reader.free
    reader.pages[:, reused] = MARK

    source.go_on()
    reader.until(lambda: not reader.held)
    assert _changed(reader, reused) == 0
    assert reader.quarantined == 0 and reader.side.door.pinned_blocks == 0
    reader.until(lambda: source.pinned() == 0)
    reader.pages[:, sorted(set(range(BLOCKS)) - set(reused))] = MARK  # what came back is used again, too


def _caught_half_way(
    story: Story, source: Source, reader: Reader, from_blocks: Sequence[int], to_blocks: Sequence[int]
) -> RequestId:
    """Stop the source when the first bytes have landed and, where it is needed for them, not the last."""
    for _ in range(TRIES):
        request = reader.claim(source, from_blocks, push=story.push)
        reader.pages[:] = 0
        landed = reader.pages[:, :, PAGE_BYTES - 1]
        reader.load(request, to_blocks)
        deadline = time.monotonic() + FIRST_BYTE_S
        while not landed.any():
            assert time.monotonic() < deadline, "nothing landed"
            time.sleep(LOOK_S)  # or this thread keeps the reader's own from running, for seconds
        source.stop()
        end = reader.end_of(request)
        came, all_of_it = int(np.count_nonzero(landed)), landed[:, to_blocks].size
        assert came, "the first bytes had landed"
        if not end.delivered and (came < all_of_it or story.alone):
            return request
        source.go_on()  # too late: on a busy machine the copy may end first
        reader.until(lambda: not reader.held)
    pytest.fail(f"{TRIES} copies ended before their source could be stopped")


def _the_next_is_delivered(source: Source, reader: Reader, rng: random.Random) -> None:
    """All blocks have been used again; those of the next handoff change, and no other ones."""
    from_blocks, to_blocks = (rng.sample(range(BLOCKS), NEXT_BLOCKS) for _ in range(2))
    for _ in range(TRIES):
        request = reader.claim(source, from_blocks)
        reader.load(request, to_blocks)
        end = reader.end_of(request)
        if end.delivered:
            break
        assert end.reason is Reason.TRANSFER_TIMEOUT, end  # the machine stood still: once more
        reader.until(lambda: not reader.held)
    assert end.delivered, end
    assert np.array_equal(reader.pages[:, to_blocks], contents(from_blocks))
    assert _changed(reader, sorted(set(range(BLOCKS)) - set(to_blocks))) == 0
    reader.until(lambda: not reader.held)


def _changed(reader: Reader, blocks: Sequence[int]) -> int:
    """How many words of these blocks are no longer all marks."""
    words = reader.pages.view(np.uint64) != MARKS
    return int(np.count_nonzero(words, axis=2)[:, blocks].sum())
