"""An engine's door, from both sides: what is noted, in order, and what comes back."""

from __future__ import annotations

import random
from typing import Any

from kvbaton.node.doorway import (
    Doorway,
    DoorwayConfig,
    DropBlocks,
    LoadReport,
    Match,
    MatchState,
    UnpinBlocks,
)  # fmt: skip
from kvbaton.node.epochs import EpochTable
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, PutId, RequestId, TransferId, WorkerId
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal
from kvbaton_proof.sim.questions.exam import Question, refused, same
from kvbaton_proof.sim.questions.interview import DIGEST, KEY, ev, fx, handoff

_R = Reason
ME = PeerId(WorkerId("d0"), Incarnation(77))
WALL = 5000.0
R = RequestId("r1")
GROUPS = ((3, 4), (NO_BLOCK, 6))
REAL = (3, 4, 6)


class Door(Doorway):
    """One that counts who is woken."""

    def __init__(self, ranks: int) -> None:
        config = DoorwayConfig(ME, ranks, 2, (KEY,), 5.0, lambda: TransferId("a" * 32), lambda: WALL)
        super().__init__(config, EpochTable(2))
        self.woken: list[str] = []
        self.wake_node, self.wake_engine = lambda: self.woken.append("node"), lambda: self.woken.append("engine")

    def noted(self, what: str, *expected: Any) -> None:
        same(what, list(self.take_events()), list(expected))
        same(f"{what}: the node is woken", self.woken.count("node"), len(expected))
        self.woken.clear()

    def comes(self, what: str, effect: Any, *expected: Any) -> None:
        self.hand_in(effect)
        same(f"{what}: the engine is woken", self.woken, ["engine"])
        self.woken.clear()
        same(f"{what}: it must be stepped", (self.busy, self.holding), (True, True))
        same(what, self.duties(), list(expected))


def leases(rng: random.Random) -> None:
    """What P pins, tells and gives back."""
    door = Door(ranks := rng.choice((1, 2, 3)))
    for block in (3, 3, 6):
        door.epochs.raise_epoch(block)
    fields: dict[str, Any] = {"max_readers": 2, "deferred": False, "target": WorkerId("d9"), "request": R, "trace": "t"}
    lease = door.begin(handoff(1), DIGEST, 4, **fields)
    begun = ev.LeaseBegun(lease, handoff(1), DIGEST, 4, 2, 2, WorkerId("d9"), False, R, "t")
    door.noted("begun", begun)
    same("the next lease", door.begin(handoff(2), DIGEST, 4), lease + 1)
    begun = ev.LeaseBegun(LeaseId(lease + 1), handoff(2), DIGEST, 4, 2, deferred=True)
    same("begins deferred", list(door.take_events()), [begun])
    door.woken.clear()
    same("what the engine must touch", door.pin(lease, GROUPS), REAL)
    door.noted("pinned", ev.LeaseExtended(lease, GROUPS, ((2, 0), (0, 1))))
    same(
        "blocks that are pinned",
        (door.pinned_blocks, door.is_leased(lease), door.is_leased(LeaseId(9))),
        (3, True, False),
    )
    same("it must be stepped", (door.busy, door.holding), (True, True))
    progress = (GroupProgress(1), GroupProgress(2))
    door.progressed(lease, progress)
    door.noted("on all ranks", *(ev.LeaseProgressed(lease, rank, progress) for rank in range(ranks)))
    door.progressed(lease, progress, 0)
    door.noted("on one rank", ev.LeaseProgressed(lease, 0, progress))
    door.completed(lease)
    door.source_ended(lease, _R.SOURCE_ABORTED)
    door.noted("completed, and ended", ev.LeaseCompleted(lease), ev.SourceEnded(lease, _R.SOURCE_ABORTED))
    door.comes("unpinned", fx.Unpin(lease), UnpinBlocks(REAL))
    door.comes("unpinned twice", fx.Unpin(lease))
    same("nothing more is pinned", (door.pin(lease, GROUPS), door.pinned_blocks), ((), 0))
    door.noted("and nothing told")
    door.comes("the other", fx.Unpin(LeaseId(lease + 1)), UnpinBlocks(()))
    same("nothing is held", (door.busy, door.holding), (False, False))


def grants(rng: random.Random) -> None:
    """A prompt that is finished is leased whole, and its ticket says so."""
    door = Door(ranks := rng.choice((1, 2)))
    readers = rng.randint(1, 3)
    text, touched = door.grant(DIGEST, 4, GROUPS, max_readers=readers, request=R, trace="t")
    name = HandoffId("a" * 32 + ".0")
    ticket = Ticket(name, ME.worker, WALL + 5.0, ME.incarnation, LeaseId(1), digest=DIGEST, max_readers=readers)
    same("its ticket", unseal(text, (KEY,), WALL), ticket)
    same("what the engine must touch", touched, REAL)
    done = whole([2, 2])
    door.noted(
        "granted", ev.LeaseBegun(LeaseId(1), name, DIGEST, 4, 2, readers, WorkerId(""), False, R, "t"),
        ev.LeaseExtended(LeaseId(1), GROUPS, ((0, 0), (0, 0))),
        *(ev.LeaseProgressed(LeaseId(1), rank, done) for rank in range(ranks)), ev.LeaseCompleted(LeaseId(1)),
    )  # fmt: skip
    same("blocks to store", door.put(GROUPS, (b"k",)), REAL)
    door.noted("a put", ev.PutWanted(PutId(2), GROUPS, (b"k",)))
    same("held twice", (door.pinned_blocks, door.put_blocks), (6, 3))
    door.comes("a lease of that number", fx.Unpin(LeaseId(2)))
    door.comes("the put", fx.UnpinPut(PutId(2)), UnpinBlocks(REAL))
    door.comes("the lease", fx.Unpin(LeaseId(1)), UnpinBlocks(REAL))


def _ticket(**fields: Any) -> str:
    given = {"handoff": handoff(1), "source": WorkerId("p0"), "expires_unix_s": WALL + 1, "lease": LeaseId(3), **fields}
    return seal(Ticket(**given), fields.pop("key", KEY))


def wants(rng: random.Random) -> None:
    """What D wants, how it stands, and that it ends once."""
    door, push = Door(ranks := rng.choice((1, 2))), rng.random() < 0.5
    lease = rng.choice((0, 3))
    text = _ticket(lease=lease, digest=rng.choice((b"", DIGEST)), target=rng.choice(("", "d0")))
    same("a stranger", door.match(R), Match(MatchState.UNKNOWN))
    door.want(R, text, DIGEST, 4, push=push, trace="t")
    door.noted("wanted", ev.Wanted(R, handoff(1), WorkerId("p0"), text, DIGEST, 4, push, lease == 0, "t"))
    same("how it stands", (door.match(R), door.waits(R)), (Match(MatchState.NOT_YET, computed=lease != 0), True))
    same("it must be stepped", (door.busy, door.holding), (True, False))
    same("nothing is held", door.holds(R), False)
    end = fx.End(_R.BUSY)
    how = rng.choice(("found", "failed", "given up", "not needed", "early"))
    if how == "failed":
        door.comes("failed", fx.MatchFailed(R, end))
        same("how it stands", (door.waits(R), door.match(R)), (False, Match(MatchState.FAILED, end)))
        door.noted("the node may forget it", ev.NotNeeded(R))
        same("it is told once", door.match(R).state, MatchState.UNKNOWN)
        return
    if how in ("given up", "not needed"):
        (door.gave_up if how == "given up" else door.not_needed)(R)
        door.noted(how, ev.GaveUp(R) if how == "given up" else ev.NotNeeded(R))
        door.gave_up(R)
        door.not_needed(R)
        door.noted("once")
        door.comes("too late", fx.MatchFound(R))
        door.comes("too late", fx.MatchFailed(R, end))
        same("a stranger", (door.match(R).state, door.waits(R)), (MatchState.UNKNOWN, False))
        return
    if how == "found":
        door.comes("found", fx.MatchFound(R))
        same("how it stands", (door.waits(R), [door.match(R).state for _ in range(2)]), (False, [MatchState.FOUND] * 2))
    same("what the engine must touch", door.allocated(R, GROUPS, 2), REAL)
    door.noted("allocated", ev.Allocated(R, GROUPS, 2))
    same("held", (door.holds(R), door.pinned_blocks, door.match(R).state), (True, 3, MatchState.UNKNOWN))
    same("it must be stepped", (door.busy, door.holding), (True, True))
    door.gave_up(R)
    door.noted("given up, and still loading", ev.GaveUp(R))
    door.comes("a report", fx.Report(R, end), *(LoadReport(R, rank, end) for rank in range(ranks)))
    same("when it was taken", list(door.taken), [(R, WALL)])
    door.comes("the hold", fx.DropHold(R, handoff(1)), DropBlocks(R, REAL))
    door.comes("the hold again", fx.DropHold(R, handoff(1)))
    same("nothing is held", (door.holds(R), door.pinned_blocks, door.busy), (False, 0, False))


def turned_away(rng: random.Random) -> None:
    """A ticket that is not for this request is refused at the door, and its P hears of it where it has one."""
    for what, text, reason, known in (
        ("forged", "rubbish", _R.TICKET_FORGED, False),
        ("over", _ticket(expires_unix_s=WALL - 1), _R.TICKET_EXPIRED, False),
        ("another prompt", _ticket(digest=b"other"), _R.CONTENT_MISMATCH, True),
        ("another D", _ticket(target=WorkerId("d7")), _R.TICKET_FORGED, False),
    ):  # fmt: skip
        door = Door(1)
        door.want(R, text, DIGEST, 4, trace="t")
        noted: list[Any] = list(door.take_events())
        away, rest = noted[0], noted[1:]
        readable = what in ("another prompt", "another D")
        same(
            what,
            (away.request, away.reason, away.trace, away.handoff),
            (R, reason, "t", handoff(1) if readable else ""),
        )
        disowned = ev.Disowned(handoff(1), WorkerId("p0"), text, b"other", False, reason)
        same(f"{what}: its P", rest, [disowned] if known else [])
        found = door.match(R)
        same(
            "how it stands",
            (found.state, found.end.reason if found.end else None, found.asked),
            (MatchState.FAILED, reason, False),
        )
        same("the node never knew", (list(door.take_events()), door.match(R).state), ([], MatchState.UNKNOWN))
    door = Door(1)
    refused("not a text", _R.TICKET_FORGED, door.open_ticket, 5)
    door.disown(_ticket(lease=0), _R.BUSY)
    same(
        "disowned",
        list(door.take_events()),
        [ev.Disowned(handoff(1), WorkerId("p0"), _ticket(lease=0), b"", True, _R.BUSY)],
    )
    door.disown(_ticket(target=WorkerId("d7")), _R.BUSY)
    door.disown(None, _R.BUSY)
    same("what is another's is not ours to disown", list(door.take_events()), [])
    door.allocated(R, GROUPS, 0)
    door.want(R, _ticket(), DIGEST, 4)
    found = door.match(R)
    same(
        "its blocks are not at rest",
        (found.state, found.end.reason if found.end else None),
        (MatchState.FAILED, _R.DUPLICATE),
    )


BANK: list[Question] = [leases, grants, wants, wants, turned_away]
