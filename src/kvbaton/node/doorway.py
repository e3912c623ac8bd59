"""The doorway between an engine's scheduler thread and its node: two queues, nothing else crosses.

Laws: only the engine's thread calls the methods marked *engine*, and only it touches the block pool; only the node's
loop calls those marked *node*. Nothing here blocks, and nothing raises because of a client or a peer: a bad ticket is a
failed match. Every hold and pin recorded here comes back exactly once from `duties`.

The vLLM adapter, the embedded engine and the simulator's engine all use this class, so the hooks' contract (one
report per rank and load, also after an abort) is kept in one place.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from kvbaton.node.epochs import EpochTable
from kvbaton.node.pin_budget import STRANGER, Holder, PinBudget
from kvbaton.node.prompt_account import PromptTimes
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import NO_BLOCK, Groups
from kvbaton.protocol.geometry.progress import Progress, whole
from kvbaton.protocol.ids import HandoffId, LeaseId, PeerId, PutId, RequestId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal

log = logging.getLogger(__name__)

ANYBODY = WorkerId("")
NOBODYS = RequestId("")
TAKEN_MAX = 4096
"""That nobody has asked about yet; the oldest are forgotten."""


class MatchState(enum.Enum):
    UNKNOWN = "unknown"  # not a known request, or already answered
    NOT_YET = "not_yet"  # ask again at the next step
    FOUND = "found"  # allocate blocks now
    FAILED = "failed"  # reported once; the policy decides


class Match(msgspec.Struct, frozen=True):
    state: MatchState
    end: fx.End | None = None
    asked: bool = True  # the node knows of it; false if the doorway refused it
    computed: bool = False  # P has the whole prompt: allocation waits for one answer only


class UnpinBlocks(msgspec.Struct, frozen=True):
    """Drop P's pins; use the pool's `unpin`, so that reuse raises the epochs."""

    blocks: tuple[int, ...]


class LoadReport(msgspec.Struct, frozen=True):
    """One rank's only report of one load."""

    request: RequestId
    rank: int
    end: fx.End


class DropBlocks(msgspec.Struct, frozen=True):
    """Give up our own hold on D's blocks."""

    request: RequestId
    blocks: tuple[int, ...]


class ForgetCached(msgspec.Struct, frozen=True):
    """These members are gone, and the prefix cache may hold KV of theirs: let no request find what is cached now, nor
    a request under way cache or hand over what it has; then say so (`cache_forgotten`)."""

    origins: tuple[str, ...]


Duty = UnpinBlocks | LoadReport | DropBlocks | ForgetCached


class DoorwayConfig(msgspec.Struct, frozen=True):
    """What the doorway needs to know about its node."""

    me: PeerId
    ranks: int
    groups: int
    ticket_keys: tuple[bytes, ...]
    ticket_ttl_s: float
    mint: Callable[[], TransferId]
    wall: Callable[[], float]


class Doorway:
    """One engine's doorway."""

    def __init__(self, config: DoorwayConfig, epochs: EpochTable) -> None:
        self.config = config
        self.epochs = epochs
        self.budget = PinBudget()  # of leases; the adapter sets the limit
        self.wake_node: Callable[[], None] = lambda: None
        self.wake_engine: Callable[[], None] = lambda: None
        self._to_node: deque[ev.Event] = deque()
        self._to_engine: deque[fx.Effect] = deque()
        self._pins: dict[LeaseId | tuple[str, PutId], list[int]] = {}
        self._turns: set[LeaseId] = set()  # of those, what is kept for next turns
        self._wants: dict[RequestId, Match] = {}
        self._holds: dict[RequestId, tuple[int, ...]] = {}
        self.taken: deque[tuple[RequestId, float]] = deque(maxlen=TAKEN_MAX)  # reports and when the engine took them
        self.times = PromptTimes(config.wall)  # of what is computed here for others
        self._last = 0

    # --- P (engine)

    def begin(
        self,
        handoff: HandoffId,
        digest: bytes,
        tokens: int,
        *,
        target: WorkerId = ANYBODY,
        max_readers: int = 1,
        deferred: bool = True,
        request: RequestId = NOBODYS,
        trace: str = "",
        keep_s: float = 0.0,
    ) -> LeaseId:
        """A prompt that will be read or pushed has been scheduled."""
        self._last += 1
        lease = LeaseId(self._last)
        if keep_s:
            self._turns.add(lease)
        else:
            self.budget.begun(lease, request)
        self.times.leased(request, lease)
        self._pins[lease] = []  # last: what fails above has begun nothing that anybody would wait for
        groups = self.config.groups
        begun = ev.LeaseBegun(
            lease, handoff, digest, tokens, groups, max_readers, target, deferred, request, trace, keep_s
        )
        self._post(begun)
        return lease

    def pin(self, lease: LeaseId, blocks: Groups) -> tuple[int, ...]:
        """Add blocks to a lease. Returns the blocks that the engine must touch now: none when the lease is over."""
        pins = self._pins.get(lease)
        if pins is None:
            return ()
        real = _real(blocks)
        if lease not in self._turns:  # nobody was promised a turn: it goes where others need its blocks
            self.budget.pin(lease, real)
        pins.extend(real)
        # Read here, on the thread that alone raises epochs: between this and the engine's touch no block can be
        # reused, so the epochs are those of the content that is leased. A commit is judged by whether they still hold.
        epochs = tuple(tuple(self.epochs.all_of(group)) for group in blocks)
        self._post(ev.LeaseExtended(lease, blocks, epochs))
        return real

    def progressed(self, lease: LeaseId, progress: Progress, rank: int | None = None) -> None:
        """The device of one rank (of all, if not given) has finished this much."""
        for each in range(self.config.ranks) if rank is None else (rank,):
            self._post(ev.LeaseProgressed(lease, each, progress))

    def completed(self, lease: LeaseId) -> None:
        self._post(ev.LeaseCompleted(lease))

    def source_ended(self, lease: LeaseId, reason: Reason) -> None:
        self._post(ev.SourceEnded(lease, reason))

    def grant(
        self,
        digest: bytes,
        tokens: int,
        blocks: Groups,
        *,
        max_readers: int = 1,
        request: RequestId = NOBODYS,
        trace: str = "",
    ) -> tuple[str, tuple[int, ...]]:
        """Lease a finished prompt (pull). Returns the ticket and the blocks that the engine must touch now."""
        config = self.config
        handoff = handoff_id(config.mint())
        lease = self.begin(
            handoff, digest, tokens, max_readers=max_readers, deferred=False, request=request, trace=trace
        )
        pinned = self.pin(lease, blocks)
        self.progressed(lease, whole([len(group) for group in blocks]))
        self.completed(lease)
        ticket = Ticket(
            handoff,
            config.me.worker,
            config.wall() + config.ticket_ttl_s,
            config.me.incarnation,
            lease,
            digest=digest,
            max_readers=max_readers,
        )
        return seal(ticket, config.ticket_keys[0]), pinned

    def put(self, blocks: Groups, keys: tuple[bytes, ...]) -> tuple[int, ...]:
        """Store blocks under content keys. Returns the blocks that the engine must touch now."""
        self._last += 1
        put = PutId(self._last)
        pinned = _real(blocks)
        self._pins["put", put] = list(pinned)
        self._post(ev.PutWanted(put, blocks, keys))
        return pinned

    # --- D (engine)

    def want(
        self,
        request: RequestId,
        ticket: str,
        digest: bytes,
        tokens: int,
        *,
        push: bool = False,
        trace: str = "",
        waits: bool = True,
    ) -> None:
        """A request arrived whose prompt KV a ticket promises. Not `waits`: its lease began long ago, or is over."""
        handoff = HandoffId("")
        # Tickets are checked here and not only by P: a forged one would make this node connect to whatever address a
        # client names, and KV of another prompt must not even be requested. P checks everything again.
        try:
            if request in self._holds:
                raise ProtocolError(Reason.DUPLICATE, "request: its blocks from an earlier handoff are not at rest")
            opened = self.open_ticket(ticket)
            handoff = opened.handoff
            if opened.digest not in (b"", digest):
                raise ProtocolError(Reason.CONTENT_MISMATCH, "ticket: it is for another prompt than this request's")
            if opened.target not in ("", self.config.me.worker):
                raise ProtocolError(Reason.TICKET_FORGED, f"ticket: it is for {opened.target}")
        except ProtocolError as error:
            self._wants[request] = Match(MatchState.FAILED, fx.End(error.reason, error.detail), asked=False)
            self._post(ev.TurnedAway(request, error.reason, error.detail, trace, handoff))
            # if P signed it, its blocks must not stay pinned for a whole lease
            self.disown(ticket, error.reason, waits=waits)
            return
        deferred = opened.lease == 0 and waits
        self._wants[request] = Match(MatchState.NOT_YET, computed=not deferred)
        self._post(ev.Wanted(request, opened.handoff, opened.source, ticket, digest, tokens, push, deferred, trace))

    def disown(self, ticket: object, reason: Reason, *, waits: bool = True) -> None:
        """A ticket came with a request that does not use it: its lease can end. From any thread.

        Not `waits`: as for `want`; a source that has no such lease must not wait for it to begin.
        """
        try:
            opened = self.open_ticket(ticket)
        except ProtocolError:
            return  # not this cluster's, or its lease is over as well
        assert isinstance(ticket, str)
        if opened.target in ("", self.config.me.worker):
            deferred = opened.lease == 0 and waits
            self._post(ev.Disowned(opened.handoff, opened.source, ticket, opened.digest, deferred, reason))

    def let_go(self, handoff: HandoffId) -> None:
        """Nobody comes for this lease any more; one that is being read ends with its reader."""
        self._post(ev.Discarded(handoff))

    def open_ticket(self, ticket: object) -> Ticket:
        """The ticket's content; ProtocolError when it is not one of this cluster's."""
        if not isinstance(ticket, str):
            raise ProtocolError(Reason.TICKET_FORGED, f"ticket: got {type(ticket).__name__}, expected text")
        return unseal(ticket, self.config.ticket_keys, self.config.wall())

    def holder_of(self, ticket: str | None) -> Holder:
        """Whose share of the room to pin a request takes: of the decode worker that its router's ticket names."""
        try:
            found = self.open_ticket(ticket)
        except ProtocolError:
            return STRANGER
        return str(found.target) if found.source == self.config.me.worker else STRANGER

    def match(self, request: RequestId) -> Match:
        """The state of the claim. Without side effects until FAILED, which is returned once."""
        found = self._wants.get(request, Match(MatchState.UNKNOWN))
        if found.state is MatchState.FAILED:
            # Schedulers poll a waiting request as often as they like. If the failure were reported twice, the policy
            # would be applied twice; if it were dropped silently, the ledger would keep the handoff until a deadline.
            del self._wants[request]
            if found.asked:
                self._post(ev.NotNeeded(request))
        return found

    def waits(self, request: RequestId) -> bool:
        """Whether P's answer is still outstanding. Without side effects, whatever it is."""
        found = self._wants.get(request)
        return found is not None and found.state is MatchState.NOT_YET

    def allocated(self, request: RequestId, blocks: Groups, first_token: int) -> tuple[int, ...]:
        """The engine has blocks for the load. Returns the blocks that it must touch now, on top of its own
        references."""
        # The hold is ours and outlives the request: bytes of an aborted load may still land, and until they cannot, the
        # blocks must not go to another request. `DropHold` releases it, after the report, whatever happens.
        self._wants.pop(request, None)
        held = _real(blocks)
        self._holds[request] = held
        self._post(ev.Allocated(request, blocks, first_token))
        return held

    def not_needed(self, request: RequestId) -> None:
        """The engine has the whole prompt already."""
        if self._wants.pop(request, None) is not None:
            self._post(ev.NotNeeded(request))

    def gave_up(self, request: RequestId) -> None:
        """The request ended in the engine; a load in flight still gets its report."""
        if self._wants.pop(request, None) is not None or request in self._holds:
            self._post(ev.GaveUp(request))

    def holds(self, request: RequestId) -> bool:
        """Whether a load of this request has blocks: its report is outstanding, or they are not at rest."""
        return request in self._holds

    # --- both (engine)

    def duties(self) -> list[Duty]:
        """The engine's duties now; called at every step."""
        found: list[Duty] = []
        while self._to_engine:
            effect = self._to_engine.popleft()
            match effect:
                case fx.Unpin(lease):
                    found += self._unpinned(lease)
                case fx.UnpinPut(put):
                    found += self._unpinned(("put", put))
                case fx.MatchFound(request):
                    if request in self._wants:  # otherwise the engine aborted it meanwhile
                        self._wants[request] = Match(MatchState.FOUND)
                case fx.MatchFailed(request, end):
                    if request in self._wants:
                        self._wants[request] = Match(MatchState.FAILED, end)
                case fx.Report(request, end):
                    # one per rank: engines count the workers that have finished a load, and wait for as many
                    self.taken.append((request, self.config.wall()))
                    found += [LoadReport(request, rank, end) for rank in range(self.config.ranks)]
                case fx.ForgetCache(origins):
                    found.append(ForgetCached(origins))
                case fx.DropHold(request):
                    held = self._holds.pop(request, None)
                    if held is not None:
                        found.append(DropBlocks(request, held))
        return found

    def cache_replaced(self) -> None:
        """Leased blocks, and blocks being loaded, can no longer be trusted; processed in order."""
        self._post(ev.CacheReplaced())

    def cache_forgotten(self, duty: ForgetCached, blocks: int) -> None:
        """The engine has done it: so many blocks can be found by no request any more."""
        self._post(ev.CacheReplaced(forgotten=True, blocks=blocks))
        names = ", ".join(origin.partition(" ")[0] for origin in duty.origins)
        log.warning(
            "[cache-reset] the prefix cache was reset: it may have held KV of %s, gone from the cluster since; "
            "%d cached blocks are computed again when they are asked for", names, blocks,
        )  # fmt: skip

    def cache_not_forgotten(self, duty: ForgetCached) -> None:
        """The engine has failed at it: it is due again."""
        self._to_engine.append(fx.ForgetCache(duty.origins))

    @property
    def holding(self) -> bool:
        """Whether blocks are pinned or held, or there is news: an engine without requests must keep stepping.

        Not for turns: they may stay pinned for minutes, and an engine with nothing to do needs none of their blocks.
        """
        return bool(len(self._pins) > len(self._turns) or self._holds or self._to_engine)

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping although it has nothing to compute (rule 19)."""
        return bool(len(self._pins) > len(self._turns) or self._holds or self._to_engine or self._wants)

    @property
    def pinned_blocks(self) -> int:
        return sum(map(len, list(self._pins.values()))) + sum(map(len, list(self._holds.values())))

    @property
    def holders(self) -> Iterator[Sequence[int]]:
        """The blocks of each lease, put and load."""
        return chain(self._pins.values(), self._holds.values())

    @property
    def put_blocks(self) -> int:
        """Those of `pinned_blocks` that a put holds."""
        return sum(len(blocks) for key, blocks in list(self._pins.items()) if isinstance(key, tuple))

    @property
    def turn_blocks(self) -> int:
        """Those of `pinned_blocks` that are kept for next turns."""
        return sum(len(self._pins.get(lease, ())) for lease in list(self._turns))

    def is_leased(self, lease: LeaseId) -> bool:
        return lease in self._pins

    # --- node

    def take_events(self) -> Sequence[ev.Event]:
        events: list[ev.Event] = []
        while self._to_node:
            events.append(self._to_node.popleft())
        return events

    def hand_in(self, effect: fx.Effect) -> None:
        self._to_engine.append(effect)
        self.wake_engine()

    # --- helpers

    def _post(self, event: ev.Event) -> None:
        self._to_node.append(event)
        self.wake_node()

    def _unpinned(self, key: LeaseId | tuple[str, PutId]) -> list[Duty]:
        pins = self._pins.pop(key, None)
        if isinstance(key, tuple):
            pass
        elif key in self._turns:
            self._turns.discard(key)
        elif pins is not None:
            self.budget.unpin(key, pins)
        return [UnpinBlocks(tuple(pins))] if pins is not None else []


def _real(blocks: Groups) -> tuple[int, ...]:
    """All non-null blocks of all groups."""
    found = tuple(chain.from_iterable(blocks))
    return tuple(block for block in found if block != NO_BLOCK) if NO_BLOCK in found else found
