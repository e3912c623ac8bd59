"""One life of one worker for tests: the ledger, and around it what an engine, its ranks and its store would hold.

Everything that the ledger promises about effects is checked as they come: an answer to a want once, a report and a
drop once per load, an unpin once per lease, bytes only into blocks that are held. `Pair` carries the frames.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.content import Content, digest
from kvbaton.protocol.effects import Begun, Capabilities, Ended, Mark, Side, Step
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK, Groups
from kvbaton.protocol.geometry.progress import Progress, whole
from kvbaton.protocol.ids import (
    HandoffId,
    Incarnation,
    JobId,
    LeaseId,
    PeerId,
    PutId,
    RequestId,
    TransferId,
    WorkerId,
    handoff_id,
    rank_peer,
)
from kvbaton.protocol.machines.context import MARKS_MAX, Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.codec import decode, encode
from kvbaton.protocol.wire.messages import ALL_FEATURES, SPOKEN, Joined, Versions, Welcome
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal
from kvbaton.transports.core.loans import WriteRecord
from kvbaton_proof.sim.world.sim_memory import Shape, page_stamp, same_tokens
from kvbaton_proof.sim.world.sim_transport import TCP

if TYPE_CHECKING:
    from pair import Pair

KEY = b"the key of the test's cluster"
WALL_S = 1_700_000_000.0
"""The wall clock when a `Pair` begins."""


def digest_of(content: int, tokens: int) -> bytes:
    """What the prompt `content` of that many tokens is, to every party."""
    return digest(Content([content] * tokens, tokens))


def transfer(number: int) -> HandoffId:
    """A handoff id that is easy to recognise."""
    return handoff_id(TransferId(f"{number:032x}"))


@dataclass(slots=True)
class Source:
    """P's book of one lease."""

    lease: LeaseId
    handoff: HandoffId
    content: int
    tokens: int
    blocks: tuple[list[int], ...]
    unpins: int = 0


@dataclass(slots=True)
class Load:
    """D's book of one request."""

    request: RequestId
    content: int
    tokens: int
    found: int = 0
    failed: fx.End | None = None
    blocks: Groups | None = None
    first_token: int = 0
    end: fx.End | None = None
    drops: int = 0


def why(load: Load) -> Reason | None:
    end = load.failed or load.end
    assert end is not None, f"{load.request} has not ended"
    return end.reason


def delivered(load: Load) -> bool:
    return load.end is not None and load.end.delivered


@dataclass(slots=True)
class Moving:
    """A copy that the ledger has started."""

    rank: int
    transport: str
    copy: fx.Copy
    generation: int  # of the endpoint that it goes by
    due: float = 0.0  # on the pair's clock: when it is over by itself
    cancelled: bool = False


@dataclass(slots=True)
class Habits:
    """What happens by itself while the pair settles; what is off waits for the test."""

    copies: bool = True  # copies arrive, cancelled ones end
    copy_s: float = 0.0  # how long a copy takes
    shut: frozenset[str] = frozenset()  # data planes that cannot be opened: their copies end so
    cancels: bool = True  # a cancelled copy is at rest at once; otherwise when it pleases
    fences: bool = True
    loans: bool = True  # the data plane lets go of what is taken back
    store: bool = True
    allocates: bool = True  # the engine finds blocks as soon as there is a match
    acknowledges: bool = True  # the engine says that it has seen a failed match


class Party:
    """One life of one worker."""

    def __init__(
        self,
        pair: Pair,
        name: str,
        *,
        shape: Shape = Shape(),  # noqa: B008 - frozen
        transports: Sequence[Capabilities] = (TCP,),
        settings: Settings = Settings(),  # noqa: B008 - frozen
        host: str = "host",
        compat: dict[str, str] | None = None,
        required: int = 0,
        optional: int = int(ALL_FEATURES),
        versions: Versions = SPOKEN,
    ) -> None:
        self.pair = pair
        self.name = WorkerId(name)
        self.shape = shape
        self.alive = True
        self.habits = Habits()
        number = pair.lives = pair.lives + 1
        self.offset_s = 1000.0 * number  # nothing may lean on two clocks agreeing
        self.epochs: Counter[int] = Counter()
        identity = Identity(
            me=PeerId(self.name, Incarnation(0xA0 + number)),
            host=host,
            compat={"model": "m", "info.version": str(number)} if compat is None else compat,
            layout=shape.layout(),
            transports=tuple(transports),
            ticket_keys=(KEY,),
            wall_offset_s=WALL_S - self.offset_s,
            required=required,
            optional=optional,
            versions=versions,
        )
        self.ledger = Ledger(identity, settings, lambda blocks: [self.epochs[block] for block in blocks])
        self.memory = [bytearray(shape.region_bytes) for _ in range(shape.ranks)]
        self.free = deque(range(1, shape.blocks))
        self.pins: Counter[int] = Counter()
        self.holds: Counter[int] = Counter()
        self.sources: dict[LeaseId, Source] = {}
        self.loads: dict[RequestId, Load] = {}
        self.puts: dict[PutId, tuple[Groups, int]] = {}
        self.storing: dict[PutId, bool] = {}  # put -> told to stop
        self.copies: dict[JobId, Moving] = {}
        self.restless: dict[JobId, Moving] = {}
        self.loans: dict[JobId, tuple[int, fx.Loan]] = {}  # with the rank
        self.taken_back: list[JobId] = []
        self.written: dict[JobId, WriteRecord] = {}  # what came under each loan, until its end is told
        self.fences: list[fx.StartFence] = []
        self.connected: dict[PeerId, fx.Connect] = {}
        self.holders: dict[PeerId, set[fx.Holder]] = {}
        self.invited: dict[tuple[int, PeerId], int] = {}  # (our rank, their rank) -> generation
        self.admitted: set[tuple[int, PeerId, int]] = set()
        self._generation = 0
        self._minted = 0
        self._todo: deque[ev.Event] = deque()

    # --- who and when

    @property
    def me(self) -> PeerId:
        return self.ledger.desk.identity.me

    @property
    def counts(self) -> Counter[str]:
        return self.ledger.desk.counts

    @property
    def now(self) -> float:
        """This party's own clock, never behind a deadline that the pair says has come."""
        at, due = self.pair.now + self.offset_s, self.ledger.next_deadline()
        return due if due is not None and 0 < due - at < 1e-6 else at

    def due(self) -> float | None:
        """When its next timer is due, on the pair's clock."""
        at = self.ledger.next_deadline()
        copies = [moving.due for moving in (*self.copies.values(), *self.restless.values()) if self.habits.copies]
        return min([*copies, *([] if at is None else [at - self.offset_s])], default=None)

    def tell(self, *events: ev.Event) -> None:
        """Events; the dead hear nothing."""
        for event in events if self.alive else ():
            self.ledger.on_event(event, self.now)
            self.carry_out()

    def on_time(self) -> None:
        self.ledger.on_time(self.now)
        self.carry_out()

    def receive(self, source: WorkerId, raw: bytes) -> None:
        self.ledger.on_frame(source, raw, self.now)
        self.carry_out()

    def leave(self) -> None:
        self.ledger.leave(self.now)
        self.carry_out()

    # --- P's engine

    def take(self, blocks: int) -> tuple[list[int], ...]:
        """Blocks from the pool, per group; handing out raises their epochs, as in every engine."""
        taken = tuple([self.free.popleft() for _ in range(blocks)] for _ in self.shape.group_layers)
        for ids in taken:
            for block in ids:
                self.scribble(block)
        return taken

    def scribble(self, block: int) -> None:
        """Something else is computed into the block."""
        self.epochs[block] += 1
        for rank in range(self.shape.ranks):
            for layer in range(self.shape.layers):
                at = self.shape.page(layer, block)
                self.memory[rank][at : at + self.shape.page_bytes] = b"\xee" * self.shape.page_bytes

    def reuse(self, *blocks: int) -> None:
        """The pool hands these out to somebody else: only what nobody holds."""
        for block in blocks:
            assert not self.pins[block] and not self.holds[block], f"block {block} is held"
            self.scribble(block)

    def begin(
        self,
        number: int = 1,
        tokens: int = 5,
        *,
        content: int | None = None,
        max_readers: int = 1,
        target: str = "",
        deferred: bool = True,
        keep_s: float = 0.0,
    ) -> Source:
        """P schedules the prompt of handoff `number` (streaming, push)."""
        content = number if content is None else content
        self._minted += 1
        lease, handoff = LeaseId(self._minted), transfer(number)
        groups = len(self.shape.group_layers)
        source = Source(lease, handoff, content, tokens, tuple([] for _ in range(groups)))
        self.sources[lease] = source
        self.tell(
            ev.LeaseBegun(
                lease,
                handoff,
                digest_of(content, tokens),
                tokens,
                groups,
                max_readers,
                WorkerId(target),
                deferred,
                keep_s=keep_s,
            )
        )
        return source

    def pin(self, source: Source, blocks: Groups) -> None:
        """The next chunk's blocks are pinned as it is scheduled."""
        if source.unpins:
            return
        for mine, ids in zip(source.blocks, blocks, strict=True):
            mine.extend(ids)
            self.pins.update(block for block in ids if block != NO_BLOCK)
        epochs = tuple(tuple(0 if block == NO_BLOCK else self.epochs[block] for block in ids) for ids in blocks)
        self.tell(ev.LeaseExtended(source.lease, blocks, epochs))

    def chunk(self, source: Source, blocks: int, *, ready: bool = True) -> None:
        """`blocks` more blocks of the prompt are pinned, computed and, if `ready`, announced by every rank."""
        self.pin(source, tuple(tuple(ids) for ids in self.take(blocks)))
        self.compute(source)
        if ready:
            self.progress(source, whole([len(ids) for ids in source.blocks]))

    def compute(self, source: Source) -> None:
        for group, ids in enumerate(source.blocks):
            first = self.shape.first_layer(group)
            for index, block in enumerate(ids):
                valid = min(self.shape.block_tokens, source.tokens - index * self.shape.block_tokens)
                for layer in range(first, first + self.shape.group_layers[group]):
                    for rank in range(self.shape.ranks):
                        if block != NO_BLOCK:
                            self._stamp(rank, layer, block, source.content, index, valid)

    def progress(self, source: Source, progress: Progress, rank: int | None = None) -> None:
        for each in range(self.shape.ranks) if rank is None else (rank,):
            self.tell(ev.LeaseProgressed(source.lease, each, progress))

    def complete(self, source: Source) -> None:
        self.tell(ev.LeaseCompleted(source.lease))

    def stream(self, number: int = 1, tokens: int = 5, **options: object) -> Source:
        """A whole prompt at once, known to D by a ticket of the router."""
        source = self.begin(number, tokens, **options)  # type: ignore[arg-type]
        self.chunk(source, -(-tokens // self.shape.block_tokens))
        self.complete(source)
        return source

    def grant(self, number: int = 1, tokens: int = 5, **options: object) -> str:
        """A finished prompt (pull): the ticket."""
        source = self.stream(number, tokens, deferred=False, **options)
        return self.ticket(source)

    def ticket(self, source: Source, /, **changes: object) -> str:
        ticket = Ticket(
            source.handoff,
            self.name,
            WALL_S + 1000.0,
            self.me.incarnation,
            source.lease,
            digest=digest_of(source.content, source.tokens),
        )
        return seal(msgspec.structs.replace(ticket, **changes), KEY)

    def put(self, number: int, blocks: int = 2) -> None:
        """The engine pins blocks and wants them stored."""
        taken = tuple(tuple(ids) for ids in self.take(blocks))
        self.pins.update(block for ids in taken for block in ids)
        self.puts[PutId(number)] = taken, 0
        self.tell(ev.PutWanted(PutId(number), taken, (b"key",)))

    # --- D's engine

    def want(
        self,
        request: str,
        ticket: str,
        number: int = 1,
        tokens: int = 5,
        *,
        content: int | None = None,
        push: bool = False,
        source: str = "p",
        deferred: bool | None = None,
    ) -> Load:
        """A request came with a ticket; D computes the digest from its own request."""
        content = number if content is None else content
        load = self.loads[RequestId(request)] = Load(RequestId(request), content, tokens)
        try:
            late = unseal(ticket, (KEY,), WALL_S).lease == 0 if deferred is None else deferred
        except Exception:  # noqa: BLE001 - a bad ticket: the ledger of P is to judge it
            late = False
        self.tell(
            ev.Wanted(
                load.request,
                transfer(number),
                WorkerId(source),
                ticket,
                digest_of(content, tokens),
                tokens,
                push,
                late,
            )
        )
        return load

    def allocate(self, request: str, first_token: int = 0) -> Load:
        """The engine has found blocks for the load, and holds them for us."""
        load = self.loads[RequestId(request)]
        size = self.shape.block_tokens
        needed = -(-load.tokens // size) - first_token // size
        load.blocks = tuple(tuple(ids) for ids in self.take(needed))
        load.first_token = first_token
        self.holds.update(block for ids in load.blocks for block in ids)
        text = " | ".join(" ".join(map(str, ids)) for ids in load.blocks)
        self.pair.note(self, f"{load.request} has blocks {text}")
        self.tell(ev.Allocated(load.request, load.blocks, first_token))
        return load

    def give_up(self, request: str) -> None:
        self.tell(ev.GaveUp(RequestId(request)))

    def not_needed(self, request: str) -> None:
        self.tell(ev.NotNeeded(RequestId(request)))

    # --- ranks and store, as the test says

    def finish(self, job: int | None = None, reason: Reason | None = None, at_rest: bool = True) -> None:
        """End the copies under way (or one): arrived, or failed half-way, perhaps not at rest."""
        for each in list(self.copies) if job is None else [JobId(job)]:
            moving = self.copies.pop(each)
            if not self._land(moving, whole_way=reason is None and not moving.cancelled) and reason is None:
                reason = Reason.TRANSFER_FAILED
            if not at_rest:
                self.restless[each] = moving
            why = Reason.CANCELLED if moving.cancelled else reason
            self.pair.note(
                self, f"copy {each} {f'ends as {why}' if why else 'has arrived'}{'' if at_rest else ', not at rest'}"
            )
            self.tell(ev.CopyEnded(each, why, at_rest))

    def rest(self, job: int | None = None) -> None:
        """Copies that had ended not at rest land now, and are at rest."""
        for each in list(self.restless) if job is None else [JobId(job)]:
            self._land(self.restless.pop(each), whole_way=True)
            self.pair.note(self, f"copy {each} is at rest")
            self.tell(ev.CopyRested(each))

    def lends(self, rank: int, peer: PeerId, direction: fx.Direction, blocks: set[int]) -> bool:
        """Whether a data plane that enforces it would let `peer` at these blocks."""
        plane = self.ledger.desk.identity.transports[0]
        if not (plane.enforces if direction is fx.Direction.READ else plane.lends_writes):
            return True
        lent = {
            block
            for at, loan in self.loans.values()
            if (at, loan.peer, loan.direction) == (rank, peer, direction)
            for ids in loan.blocks
            for block in ids
        }
        return blocks <= lent

    def end_fences(self) -> None:
        while self.fences:
            fence = self.fences.pop(0)
            self.admitted -= {one for one in self.admitted if one[:2] == (fence.rank, fence.peer)}
            self.pair.note(self, f"{fence.peer.worker} is shut out of rank {fence.rank}")
            self.tell(ev.RankFenced(fence.rank, fence.peer))

    def end_puts(self, reason: Reason | None = None) -> None:
        for put in list(self.storing):
            cancelled = self.storing.pop(put)
            self.pair.note(self, f"put {put} is over")
            self.tell(ev.StoreEnded(put, Reason.CANCELLED if cancelled else reason))

    def act(self) -> bool:
        """What happens by itself; whether anything did."""
        if self._todo:
            self.tell(self._todo.popleft())
        elif self.habits.allocates and (found := self._unanswered_match()):
            self.allocate(found)
        elif self.habits.copies and self._end_a_copy():
            pass
        elif self.habits.loans and self.taken_back:
            loan = self.taken_back.pop(0)
            record = self.written.pop(loan)
            self.tell(ev.CopyEnded(loan, Reason.CANCELLED, unwritten=record.missing_bytes() if record.due else None))
        elif self.habits.fences and self.fences:
            self.end_fences()
        elif self.habits.store and self.storing:
            self.end_puts()
        else:
            return False
        return True

    def _end_a_copy(self) -> bool:
        now = self.pair.now
        for job, moving in self.copies.items():
            if moving.transport in self.habits.shut:
                self.finish(job, Reason.UNREACHABLE)
                return True
            if moving.due <= now or moving.cancelled:
                self.finish(job, at_rest=moving.due <= now or self.habits.cancels)
                return True
        for job, moving in self.restless.items():
            if moving.due <= now:
                self.rest(job)
                return True
        return False

    # --- effects

    def carry_out(self) -> None:
        while effects := self.ledger.take_effects():
            for effect in effects:
                self._do(effect)

    def _do(self, effect: fx.Effect) -> None:
        if not isinstance(effect, fx.Send):
            self.pair.note(self, effect)
        match effect:
            case fx.Send():
                self._send(effect)
            case fx.StartCopy(rank, transport, copy):
                generation, due = self._generation_of(copy.peer, rank), self.pair.now + self.habits.copy_s
                self.copies[copy.job] = Moving(rank, transport, copy, generation, due)
            case fx.Lend(rank, _, loan):
                self.loans[loan.job] = rank, loan
                self.written[loan.job] = WriteRecord(loan.due)
            case fx.CancelCopy(_, _, job) if job in self.loans or job not in self.copies:
                if self.loans.pop(job, None) is not None:  # a loan that is being taken back may be asked for once more
                    self.taken_back.append(job)
            case fx.CancelCopy(_, _, job):
                self.copies[job].cancelled = True
            case fx.StartFence():
                self.fences.append(effect)
            case fx.Connect():
                self._connect(effect)
            case fx.Disconnect():
                self._disconnect(effect)
            case fx.StorePut(put):
                self.storing[put] = False
            case fx.CancelPut(put):
                self.storing[put] = True
            case _:
                self._engine(effect)

    def _engine(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Unpin(lease):
                source = self.sources[lease]
                source.unpins += 1
                assert source.unpins == 1, f"{self.name}: lease {lease} was unpinned twice"
                self.drop(self.pins, tuple(tuple(ids) for ids in source.blocks))
            case fx.UnpinPut(put):
                blocks, unpins = self.puts[put]
                assert unpins == 0, f"{self.name}: put {put} was unpinned twice"
                self.puts[put] = blocks, 1
                self.drop(self.pins, blocks)
            case fx.MatchFound(request):
                load = self.loads[request]
                assert not load.found and load.failed is None, f"{self.name}: {request} matched twice"
                load.found = 1
            case fx.MatchFailed(request, end):
                load = self.loads[request]
                assert load.failed is None and load.blocks is None, f"{self.name}: {request} failed twice"
                load.failed = end
                if self.habits.acknowledges:
                    self._todo.append(ev.NotNeeded(request))
            case fx.Report(request, end):
                load = self.loads[request]
                assert load.blocks is not None and load.end is None, f"{self.name}: {request} reported twice"
                load.end = end
                self._check_content(load)
            case fx.DropHold(request):
                load = self.loads[request]
                assert load.end is not None and load.blocks is not None and not load.drops
                load.drops = 1
                self.drop(self.holds, load.blocks)

    def drop(self, counter: Counter[int], blocks: Groups) -> None:
        """One reference less each; what nobody holds goes back to the pool."""
        for block in (block for ids in blocks for block in ids if block != NO_BLOCK):
            counter[block] -= 1
            assert counter[block] >= 0, f"{self.name}: block {block} was dropped more often than taken"
            if not self.pins[block] and not self.holds[block]:
                self.free.append(block)

    def _connect(self, effect: fx.Connect) -> None:
        self.holders.setdefault(effect.peer, set()).add(effect.holder)
        if all(endpoint.isdigit() for endpoint in effect.endpoints):
            self.connected[effect.peer] = effect
        else:  # as the node does, before anything else happens
            self._todo.appendleft(ev.PlaneFailed(effect.peer, effect.holder))

    def _disconnect(self, effect: fx.Disconnect) -> None:
        """Both roles of a pair share a data connection: the last to let go closes it. What moves may still land."""
        holders = self.holders.get(effect.peer, set())
        holders.discard(effect.holder)
        if not holders:
            self.holders.pop(effect.peer, None)
            self.connected.pop(effect.peer, None)
            ranks = {rank_peer(effect.peer, n) for n in range(effect.ranks)}
            self.invited = {pair: n for pair, n in self.invited.items() if pair[1] not in ranks}

    def _send(self, effect: fx.Send) -> None:
        message = effect.message
        if effect.invitation is not None and isinstance(message, Welcome | Joined):
            message = msgspec.structs.replace(message, endpoints=self._endpoints(effect.invitation))
        raw = encode(self.me, effect.to, effect.session, message, effect.version)
        said = decode(raw)[1] if effect.version == 1 else message  # version 1 does not say all of it
        self.pair.post(self, effect.worker, said, raw)

    def _endpoints(self, invitation: fx.Invitation) -> tuple[bytes, ...]:
        found = []
        self.holders.setdefault(invitation.peer, set()).add(invitation.holder)
        for rank in range(self.shape.ranks):
            for remote in range(invitation.ranks):
                key = rank, rank_peer(invitation.peer, remote)
                if key not in self.invited:
                    self._generation += 1
                    self.invited[key] = self._generation
                    self.admitted.add((*key, self._generation))
                found.append(b"%d" % self.invited[key])
        return tuple(found)

    def _generation_of(self, remote: PeerId, rank: int) -> int:
        """Which admission our rank has at that rank of a peer: `endpoints[s * ours + r]`."""
        for connect in self.connected.values():
            for number in range(connect.ranks):
                if rank_peer(connect.peer, number) == remote:
                    return int(connect.endpoints[number * self.shape.ranks + rank])
        raise AssertionError(f"{self.name}: {remote} is not connected")

    # --- bytes

    def _land(self, moving: Moving, *, whole_way: bool) -> bool:
        """Move the bytes of a copy, or half of them; False when the other side cannot be reached."""
        copy = moving.copy
        remote, rank = self.pair.life_of(copy.peer)
        if remote is None:
            return False
        spans = [copy.spans[i : i + 3] for i in range(0, len(copy.spans), 3)]
        if not remote.lends(rank, self.me, copy.direction, {remote.shape.block_at(far) for _, far, _ in spans}):
            return False
        here, there = self.memory[moving.rank], remote.memory[rank]
        for local, far, size in spans if whole_way else spans[: len(spans) // 2]:
            if copy.direction is fx.Direction.READ:
                self.check_held(local, size)
                here[local : local + size] = there[far : far + size]
                continue
            if (rank, rank_peer(self.me, moving.rank), moving.generation) not in remote.admitted:
                return False
            remote.check_held(far, size)
            assert self.pins[self.shape.block_at(local)], f"{self.name}: writes from a block that is not pinned"
            there[far : far + size] = here[local : local + size]
            remote.note_written(rank, self.me, copy.remote_region, far, size)
        return True

    def note_written(self, rank: int, peer: PeerId, region: int, offset: int, size: int) -> None:
        block = self.shape.block_at(offset)
        for job, (at, loan) in self.loans.items():
            if (at, loan.peer) == (rank, peer) and any(block in ids for ids in loan.blocks):
                self.written[job].add(region, array("q", (offset, size)))

    def check_held(self, offset: int, size: int) -> None:
        """Bytes land only in blocks that are held for a handoff."""
        for at in (offset, offset + size - 1):
            block = self.shape.block_at(at)
            assert self.holds[block], f"{self.name}: bytes land in block {block}, which no handoff holds"

    def _stamp(self, rank: int, layer: int, block: int, content: int, index: int, valid: int) -> None:
        at = self.shape.page(layer, block)
        page = page_stamp(self.shape, content, layer, index, rank, valid)
        self.memory[rank][at : at + self.shape.page_bytes] = page

    def _check_content(self, load: Load) -> None:
        """What was delivered, and what is proven good of what failed, is this prompt's KV in every cell."""
        assert load.end is not None and load.blocks is not None
        good = load.tokens if load.end.delivered else load.end.good_tokens
        shape = self.shape
        skipped = load.first_token // shape.block_tokens
        for group, ids in enumerate(load.blocks):
            first = shape.first_layer(group)
            for index, block in enumerate(ids, skipped):
                valid = min(shape.block_tokens, good - index * shape.block_tokens)
                for layer in range(first, first + shape.group_layers[group]):
                    for rank, memory in enumerate(self.memory):
                        at = shape.page(layer, block)
                        page = memory[at : at + shape.page_bytes]
                        stamp = page_stamp(shape, load.content, layer, index, rank, shape.block_tokens)
                        assert valid <= 0 or same_tokens(shape, page, stamp, valid), (
                            f"{self.name}: {load.request}: layer {layer} of block {index} is not this prompt's"
                        )

    def _unanswered_match(self) -> str:
        waiting = (load for load in self.loads.values() if load.found and load.failed is None and load.blocks is None)
        return next((str(load.request) for load in waiting), "")

    # --- at rest

    def check_at_rest(self) -> None:
        """Promises 2 and 3: everything that began has ended, once, and nothing is remembered that waits."""
        ledger = self.ledger
        for load in self.loads.values():
            answered = load.found or load.failed is not None or load.end is not None  # blocks may come first
            assert answered, f"{self.name}: {load.request} was never answered"
            assert load.blocks is None or (load.end and load.drops == 1), f"{self.name}: {load} is not over"
        assert [s.lease for s in self.sources.values() if s.unpins != 1] == []
        assert [put for put, (_, unpins) in self.puts.items() if unpins != 1] == []
        assert not +self.pins and not +self.holds
        assert not self.copies and not self.restless and not self.fences
        assert ledger.is_idle()
        assert not ledger.consumer.by_request and not ledger.consumer.by_attempt and not ledger.consumer.by_reservation
        assert not ledger.producer.writer.outlets and not ledger.producer.writer.by_reader
        assert not ledger.producer.by_handoff and not ledger.desk.owners
        assert len(ledger.desk.timers) == 0 and ledger.next_deadline() is None
        self._check_marks()

    def _check_marks(self) -> None:
        """The law of `protocol.effects`: each story begins once, ends once, and rests last."""
        stories: dict[tuple[Side, int], list[Mark]] = {}
        for mark in self.ledger.desk.marks:
            stories.setdefault((mark.side, mark.key), []).append(mark)
        for marks in stories.values() if len(self.ledger.desk.marks) < MARKS_MAX else ():
            assert isinstance(marks[0].what, Begun), marks
            assert marks[-1].step is Step.RESTED, marks
            assert [type(mark.what) for mark in marks if mark.what is not None] == [Begun, Ended], marks
