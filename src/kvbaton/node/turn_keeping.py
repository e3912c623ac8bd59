"""Turns: D keeps the KV of an ended request for the next turn of its conversation, and the next turn's P takes it.

Laws: nobody was promised a turn, so nothing here fails a request, and nothing waits longer than `TAKE_S` for it. What
is kept pins at most a share of the cache, the oldest goes first, and all of it goes before a request waits for blocks.
What is taken is bound to its content like any handoff: by the digest of the tokens that it is of. Only the engine's
thread calls this; statistics may read it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.node.doorway import Doorway, Match, MatchState
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import NO_BLOCK, Groups
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import HandoffId, LeaseId, RequestId
from kvbaton.protocol.numbers import TERM_S_MAX

TAKE_S = 2.0
"""How long P waits for D's answer before it computes: a prompt of a few thousand tokens takes no longer."""
TURNS_MAX = 4096
RESERVE_SHARE = 8
"""One part in so many of the cache is kept free of turns, for the blocks that running requests grow by. More than
`pin_budget.ROOM_SHARE`: an engine would else go on saying that it is full, for blocks that turns would give back."""
RETURN_S = 0.5
"""What was let go of is back within milliseconds; longer only if it is being read, as long as its reader likes."""
ASKED_MAX = 65_536


class TurnSettings(msgspec.Struct, frozen=True):
    """What of its cache a D keeps for conversations that may go on."""

    turn_s: float = 0.0  # how long; 0: nothing is kept
    turn_percent: float = 25.0  # of the cache, at most

    def __post_init__(self) -> None:
        if not 0 <= self.turn_s <= TERM_S_MAX:  # false for NaN as well
            raise ValueError(f"turn_s: got {self.turn_s!r}, expected 0 (off) to {TERM_S_MAX:g} seconds")
        if not 0 < self.turn_percent <= 100:
            raise ValueError(f"turn_percent: got {self.turn_percent!r}, expected above 0, to 100")


@dataclass(slots=True)
class KeptTurn:
    """What D keeps of one ended request."""

    handoff: HandoffId
    lease: LeaseId
    blocks: int
    going: bool = False  # let go; its blocks are on their way back
    gone_at: float = 0.0  # when, on the wall's clock


class TurnKeeper:
    """D's half: all turns that one engine keeps."""

    def __init__(self, door: Doorway, settings: TurnSettings, blocks_total: int) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()  # what was not kept, by reason; evicted
        self._door = door
        self._most = math.floor(blocks_total * settings.turn_percent / 100) if settings.turn_s else 0
        self._reserve = blocks_total // RESERVE_SHARE
        self._kept: dict[LeaseId, KeptTurn] = {}  # oldest first

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def keep(self, ticket: object, digest: bytes, tokens: int, blocks: Groups, request: RequestId) -> tuple[int, ...]:
        """Lease an ended request's blocks. Returns those that the engine must touch now: none if it is not kept."""
        if not self.is_on or tokens < 1:
            return ()
        self.settle()
        count = sum(1 for group in blocks for block in group if block != NO_BLOCK)
        try:
            opened = self._door.open_ticket(ticket)
        except ProtocolError as error:
            self.counts[f"unkept.{error.reason}"] += 1
            return ()
        if opened.source != self._door.config.me.worker or opened.lease:
            self.counts["unkept.ticket_forged"] += 1
            return ()
        crowded = len(self._kept) >= TURNS_MAX
        fits = self.blocks + count <= self._most and not crowded
        self._make_place(2 * count if fits else count)  # so that the next of its size finds its place free
        if not fits:
            self.counts["unkept.busy"] += 1
            self._let_go(1 if crowded else 0)
            return ()
        lease = self._door.begin(
            opened.handoff,
            digest,
            tokens,
            target=opened.target,
            deferred=False,
            request=request,
            keep_s=self.settings.turn_s,
        )
        self._kept[lease] = KeptTurn(opened.handoff, lease, count)
        pinned = self._door.pin(lease, blocks)
        self._door.progressed(lease, whole([len(group) for group in blocks]))
        self._door.completed(lease)
        return pinned

    @property
    def blocks(self) -> int:
        """Pinned for turns, those on their way back included."""
        return sum(turn.blocks for turn in list(self._kept.values()))

    def settle(self) -> None:
        """Forget what is over: taken, expired, or let go."""
        for lease in [lease for lease in self._kept if not self._door.is_leased(lease)]:
            del self._kept[lease]

    def press(self, free_blocks: int, needed: int = 0) -> None:
        """A request needs so many blocks, and running ones will grow: let the oldest go, as many as that takes."""
        short = needed + self._reserve - free_blocks
        if short <= 0 or not self._kept:  # asked in every hook: where there are enough, nothing is counted
            return
        self.settle()
        now = self._door.config.wall()
        coming = (turn for turn in self._kept.values() if turn.going and 0 <= now - turn.gone_at <= RETURN_S)
        self._let_go(short - sum(turn.blocks for turn in coming))

    def let_all_go(self) -> None:
        self._let_go(math.inf)

    def _make_place(self, count: int) -> None:
        live = sum(turn.blocks for turn in self._kept.values() if not turn.going)
        self._let_go(live + min(count, self._most) - self._most)

    def _let_go(self, blocks: float) -> None:
        for turn in self._kept.values():
            if blocks <= 0:
                return
            if not turn.going:
                turn.going, turn.gone_at = True, self._door.config.wall()
                blocks -= turn.blocks
                self.counts["evicted"] += 1
                self._door.let_go(turn.handoff)


@dataclass(slots=True)
class AskedTurn:
    """What P was told that D has of a prompt."""

    tokens: int
    until: float  # on the wall's clock, which only decides when to give up
    external: int = 0  # of them, those that are being loaded


@dataclass(slots=True)
class TurnTaker:
    """P's half: prompts of which a D has the beginning."""

    door: Doorway
    loads: Counter[str] = field(default_factory=Counter)  # by outcome: taken, or why not
    tokens: int = 0  # that were not computed here
    _asked: dict[RequestId, AskedTurn] = field(default_factory=dict)

    def ask(
        self, request: RequestId, ticket: str, tokens: int, prompt_tokens: int, digest_of: Callable[[int], bytes]
    ) -> None:
        """A request came of which D had `tokens` tokens when it ended: the last of them has no KV there."""
        position = tokens - 1
        if not 0 < position < prompt_tokens or len(self._asked) >= ASKED_MAX:
            self.loads["unfit"] += 1
            self.door.disown(ticket, Reason.ABORTED, waits=False)
            return
        if self._is_kept_here(ticket):
            return
        self.door.want(request, ticket, digest_of(position), position, waits=False)
        self._asked[request] = AskedTurn(position, self.door.config.wall() + TAKE_S)

    def _is_kept_here(self, ticket: str) -> bool:
        """A turn that this engine keeps itself, as D: its prefix cache has it, and nobody else comes for it."""
        try:
            opened = self.door.open_ticket(ticket)
        except ProtocolError:
            return False  # which is `want`'s to say
        if opened.source != self.door.config.me.worker:
            return False
        self.loads["known"] += 1
        self.door.let_go(opened.handoff)
        return True

    def stats(self) -> dict[str, Any]:
        """Figures by metric names without their `kvbaton_`."""
        return {"turn_loads_total": dict(self.loads), "turn_tokens_total": self.tokens}

    def awaits(self, request: RequestId) -> bool:
        """Whether D's answer decides about this request."""
        turn = self._asked.get(request)
        return turn is not None and not turn.external

    def is_loading(self, request: RequestId) -> bool:
        turn = self._asked.get(request)
        return turn is not None and turn.external > 0

    def match(self, request: RequestId, local_tokens: int, worth: int) -> int | None:
        """Tokens to load after the local ones, 0 where it is over, None while D has not answered."""
        turn = self._asked[request]
        found: Match = self.door.match(request)
        missing = turn.tokens - local_tokens
        if found.state is MatchState.NOT_YET and missing >= worth:
            if 0 <= turn.until - self.door.config.wall() <= TAKE_S:
                return None
            self._over(request, "late")
        elif found.state is MatchState.FOUND and missing >= worth:
            return missing
        elif found.state is MatchState.FAILED and found.end is not None:
            self._over(request, str(found.end.reason))
        else:
            self._over(request, "known")
        self.door.not_needed(request)
        return 0

    def give_up_late(self) -> None:
        """Of what D has not answered in time: for engines that ask only when an answer has come."""
        now = self.door.config.wall()
        late = [
            request
            for request, turn in self._asked.items()
            if not turn.external and not 0 <= turn.until - now <= TAKE_S and self.door.waits(request)
        ]
        for request in late:
            self._over(request, "late")
            self.door.not_needed(request)

    def first_token(self, request: RequestId, external_tokens: int) -> tuple[int, int]:
        """The load begins: its first token, and the one behind its last."""
        turn = self._asked[request]
        turn.external = external_tokens
        return turn.tokens - external_tokens, turn.tokens

    def upto(self, request: RequestId) -> int:
        """How many tokens have their KV once the load is there."""
        return self._asked[request].tokens

    def loaded(self, request: RequestId, reason: Reason | None) -> None:
        """The load's one end."""
        if reason is None:
            self.loads["taken"] += 1
            self.tokens += self._asked.pop(request).external
        else:
            self._over(request, str(reason))

    def give_up(self, request: RequestId, reason: Reason) -> None:
        """Nothing is to be loaded for this request, if nothing is yet."""
        if self.awaits(request):
            self._over(request, str(reason))
            self.door.not_needed(request)

    def forget(self, request: RequestId) -> None:
        """The request is over. A load that has blocks keeps its place until its report."""
        if not (self.is_loading(request) and self.door.holds(request)):
            self._asked.pop(request, None)

    def drop(self, request: RequestId) -> None:
        """A load was to begin and did not: there will be no report of it."""
        if self.is_loading(request) and not self.door.holds(request):
            self._over(request, str(Reason.ABORTED))

    def _over(self, request: RequestId, why: str) -> None:
        self._asked.pop(request, None)
        self.loads[why] += 1
