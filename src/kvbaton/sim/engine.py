"""A simulated engine: a block pool, a scheduler and stamped memory, behind the production `Doorway`.

It keeps the contract that vLLM's scheduler enforces (reference: invariants of the hooks): a load that was begun waits
for exactly one report per rank, also after an abort; an unknown or second report is the death of an engine.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.protocol.content import Content, digest
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, LeaseId, RequestId, WorkerId
from kvbaton.protocol.progress import GroupProgress, Progress, whole
from kvbaton.runtime.doorway import Doorway, DropBlocks, LoadReport, MatchState, UnpinBlocks
from kvbaton.sim.memory import Shape, page_stamp
from kvbaton.sim.world import World


class Broken(BaseException):
    """A promise was broken; the simulator stops this world and reports it. No `except Exception` swallows it."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise
        self.what = what


WRONG, HANG, LEAK, DEATH, STRANGER = "no wrong answer", "no hang", "no leak", "no engine death", "no stranger"
NEEDLESS = "no needless failure"
"""Not one of the five, but what makes them worth having: where nothing is wrong, handoffs are delivered."""


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    LOADING = "loading"
    DECODING = "decoding"


@dataclass(slots=True)
class SimRequest:
    """One request inside one engine."""

    id: RequestId
    content: int
    tokens: int
    role: str  # "prefill", "decode", "both"
    on_end: Callable[[str, str], None]
    mode: str = "pull"
    ticket: str = ""
    handoff: HandoffId = HandoffId("")
    target: WorkerId = WorkerId("")
    max_readers: int = 1
    phase: Phase = Phase.WAITING
    blocks: tuple[list[int], ...] = ()
    computed: int = 0
    lease: LeaseId | None = None
    reported: set[int] = field(default_factory=set)
    failed: End | None = None
    first_token: int = 0
    aborted: bool = False
    decode_left: int = 0
    remote_done: bool = False  # matched or failed once: never again
    lagging: int = 0  # ranks whose device has not finished the chunk
    announced: int = 0  # whole blocks that the lease has been told of
    trusted: bool = True  # its ticket is genuine


class Pool:
    """Blocks with reference counts; reuse raises the epoch first."""

    def __init__(self, blocks: int, doorway: Doorway) -> None:
        self.refs = [0] * blocks
        self.free: deque[int] = deque(range(1, blocks))  # block 0 is nobody's
        self.held = [0] * blocks  # our own holds on destination blocks
        self.reuses = [0] * blocks
        self.total = 0
        self._doorway = doorway

    def allocate(self, count: int) -> list[int]:
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            self._doorway.epochs.raise_epoch(block)
            self.reuses[block] += 1
            self.refs[block] = 1
        self.total += count
        return taken

    def revive(self, block: int) -> None:
        """Take a block with its content: somebody wants the same prefix again."""
        if self.refs[block] == 0:
            self.free.remove(block)
        self.refs[block] += 1
        self.total += 1

    def touch(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                raise Broken(LEAK, f"block {block} was pinned while it was free")
            self.refs[block] += 1
        self.total += len(blocks)

    def drop(self, blocks: list[int] | tuple[int, ...]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] < 0:
                raise Broken(LEAK, f"block {block} was freed more often than it was taken")
            if self.refs[block] == 0:
                self.free.append(block)
        self.total -= len(blocks)


class SimEngine:
    """One engine in one life."""

    def __init__(
        self, world: World, name: str, shape: Shape, doorway: Doorway, memory: list[bytearray], policy: str
    ) -> None:
        self.world = world
        self.name = name
        self.shape = shape
        self.doorway = doorway
        self.memory = memory
        self.policy = policy
        self.pool = Pool(shape.blocks, doorway)
        self.requests: dict[RequestId, SimRequest] = {}
        self.cached: dict[tuple[int, int, int], tuple[int, int]] = {}  # (content, group, index) -> (block, epoch)
        self._true_epochs = self.pool.reuses  # the engine's own truth, whatever the core believes
        self.own_refs = 0
        self.layerwise = False
        self.stopped = False
        self.preempt = 0.0
        self.put = 0.0

    # --- requests

    def add(self, request: SimRequest) -> None:
        self.requests[request.id] = request
        if request.role == "decode" and request.ticket:
            self.doorway.want(
                request.id, request.ticket, digest_of(request), request.tokens, push=request.mode == "push"
            )

    def abort(self, id: RequestId) -> None:
        request = self.requests.get(id)
        if request is None or request.aborted:
            return
        request.aborted = True
        if request.lease is not None:
            self.doorway.source_ended(request.lease, Reason.SOURCE_ABORTED)
            request.lease = None
        self.doorway.gave_up(id)
        if request.phase is not Phase.LOADING:
            self._remove(request)

    # --- one step

    def step(self) -> None:
        self._do_duties()
        for request in list(self.requests.values()):
            if request.id in self.requests:
                self._advance(request)
        self._do_duties()

    def step_down(self) -> None:
        """The engine gives up every request before its process ends; what the door still holds comes back first."""
        for request in list(self.requests.values()):
            request.on_end = _nobody
            self.doorway.gave_up(request.id)
        self._do_duties()

    @property
    def busy(self) -> bool:
        return bool(self.requests) or self.doorway.busy

    def _do_duties(self) -> None:
        for duty in self.doorway.duties():
            if isinstance(duty, UnpinBlocks):
                self.pool.drop(duty.blocks)
            elif isinstance(duty, DropBlocks):
                for block in duty.blocks:
                    self.pool.held[block] -= 1
                self.pool.drop(duty.blocks)
            elif isinstance(duty, LoadReport):
                self._report(duty)

    def _report(self, duty: LoadReport) -> None:
        request = self.requests.get(duty.request)
        if request is None or request.phase is not Phase.LOADING:
            raise Broken(DEATH, f"{self.name}: a report for {duty.request}, which is not loading")
        if duty.rank in request.reported:
            raise Broken(DEATH, f"{self.name}: rank {duty.rank} reported {duty.request} twice")
        request.reported.add(duty.rank)
        if not duty.end.delivered:
            request.failed = duty.end
        if len(request.reported) == self.shape.ranks:
            self._loaded(request)

    def _loaded(self, request: SimRequest) -> None:
        self.world.tell(f"{self.name} loaded {request.id} {request.failed.reason if request.failed else 'ok'}")
        if request.aborted:
            self._remove(request)
        elif request.failed is None:
            if not request.trusted:
                raise Broken(STRANGER, f"{self.name}: {request.id} was delivered on a forged ticket")
            self.check(request, "as delivered")
            request.computed = request.tokens
            self._start_decoding(request)
        elif self.policy == "fail":
            self._finish(request, "failed", str(request.failed.reason))
        else:
            self._keep_good_prefix(request)

    def _keep_good_prefix(self, request: SimRequest) -> None:
        """Recompute; what is proven good stays where it is, as vLLM does for one group."""
        assert request.failed is not None
        good = request.failed.good_tokens // self.shape.block_tokens * self.shape.block_tokens
        if good > request.first_token and len(self.shape.group_layers) == 1:
            self._check_tokens(request, good, "as proven good")
            request.computed = good
            request.phase = Phase.PREFILLING
        else:
            self._free(request)
            request.computed = 0
            request.phase = Phase.WAITING

    def _advance(self, request: SimRequest) -> None:
        if request.phase is Phase.WAITING:
            self._schedule(request)
        elif request.phase is Phase.PREFILLING:
            self._prefill(request)
        elif request.phase is Phase.DECODING:
            self._decode(request)

    def _schedule(self, request: SimRequest) -> None:
        if request.role == "decode" and request.ticket and not request.remote_done:
            match = self.doorway.match(request.id)
            if match.state is MatchState.NOT_YET:
                return
            if match.state is MatchState.FOUND:
                self._load(request)
                return
            request.remote_done = True
            self.world.tell(f"{self.name} no match {request.id} {match.end.reason if match.end else ''}")
            if self.policy == "fail" and match.end is not None:
                self._finish(request, "failed", str(match.end.reason))
                return
        if self._allocate(request):
            request.phase = Phase.PREFILLING
            if request.handoff and request.role == "prefill":
                self._begin_lease(request)

    def _allocate(self, request: SimRequest) -> bool:
        shape = self.shape
        per_group, groups = -(-(request.tokens + 1) // shape.block_tokens), len(shape.group_layers)
        if len(self.pool.free) < per_group * groups:
            return False
        same = self._same_prefix(request) if request.role == "prefill" else 0
        taken = []
        for group in range(groups):
            found = [self.cached[request.content, group, index][0] for index in range(same)]
            for block in found:
                self.pool.revive(block)
            taken.append([*found, *self.pool.allocate(per_group - same)])
        request.blocks = tuple(taken)
        request.computed = same * shape.block_tokens
        self.own_refs += per_group * groups
        return True

    def _same_prefix(self, request: SimRequest) -> int:
        """Leading whole blocks of this prompt that are still cached; one token is always left to compute."""
        for index in range((request.tokens - 1) // self.shape.block_tokens):
            for group in range(len(self.shape.group_layers)):
                block, epoch = self.cached.get((request.content, group, index), (0, -1))
                if self.epoch(block) != epoch:
                    return index
        return (request.tokens - 1) // self.shape.block_tokens

    def epoch(self, block: int) -> int:
        return self._true_epochs[block]

    def _load(self, request: SimRequest) -> None:
        if not self._allocate(request):
            return
        request.remote_done = True
        request.phase = Phase.LOADING
        block_tokens = self.shape.block_tokens
        have = self.world.rng.randrange(0, request.tokens, block_tokens) if self.world.chance(0.2) else 0
        request.first_token = have
        for index in range(have // block_tokens):
            self._write_block(request, index, range(self.shape.layers))
        needed = -(-request.tokens // block_tokens)
        wanted = tuple(tuple(ids[have // block_tokens : needed]) for ids in request.blocks)
        self.pool.touch(self._hold(self.doorway.allocated(request.id, wanted, have)))

    def _hold(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        for block in blocks:
            self.pool.held[block] += 1
        return blocks

    # --- computing

    def _prefill(self, request: SimRequest) -> None:
        if request.lagging:
            return
        if request.computed == request.tokens:
            self._prefilled(request)
            return
        if request.role == "prefill" and self.world.chance(self.preempt):
            self._preempt(request)
            return
        before = request.computed
        request.computed = min(request.tokens, before + self.world.rng.choice((2, 4, 8, 16)))
        blocks = range(before // self.shape.block_tokens, -(-request.computed // self.shape.block_tokens))
        if request.lease is not None:
            self._pin_chunk(request)
        self._compute(request, blocks, 0)
        for rank in range(1, self.shape.ranks):
            request.lagging += 1
            later = functools.partial(self._catch_up, request, blocks, rank)
            self.world.after(self.world.rng.uniform(0, 0.02), later)
        if not request.lagging:
            self._chunk_done(request)

    def _catch_up(self, request: SimRequest, blocks: range, rank: int) -> None:
        """The other ranks of an engine finish a step a little later than the first."""
        request.lagging -= 1
        if not self.stopped and request.id in self.requests and request.blocks:
            self._compute(request, blocks, rank)
            if not request.lagging:
                self._chunk_done(request)

    def _chunk_done(self, request: SimRequest) -> None:
        if request.role == "prefill":
            for group, ids in enumerate(request.blocks):
                for index in range(request.computed // self.shape.block_tokens):
                    self.cached[request.content, group, index] = ids[index], self.epoch(ids[index])
        if request.lease is not None and request.computed == request.tokens:
            self.doorway.completed(request.lease)
        self.doorway.wake_engine()

    def _prefilled(self, request: SimRequest) -> None:
        if request.role == "prefill":
            self._finish_prefill(request)
        else:
            self._start_decoding(request)

    def _compute(self, request: SimRequest, blocks: range, rank: int) -> None:
        for layer in range(self.shape.layers):
            for index in blocks:
                self._write_block(request, index, range(layer, layer + 1), (rank,))
            if request.lease is not None and self.layerwise and self.world.chance(0.5):
                self.doorway.progressed(request.lease, self._ahead(request, layer + 1), rank)
        if request.lease is not None:
            if rank == self.shape.ranks - 1:
                request.announced = self._chunk_end(request)
            self.doorway.progressed(
                request.lease, whole([self._chunk_end(request)] * len(self.shape.group_layers)), rank
            )

    def _ahead(self, request: SimRequest, layers: int) -> Progress:
        """What is ready when `layers` layers (through all groups) of the chunk are done: whole blocks only."""
        now_whole = request.computed // self.shape.block_tokens
        found = []
        for group, count in enumerate(self.shape.group_layers):
            done = max(0, min(count, layers - self.shape.first_layer(group)))
            before = min(request.announced, now_whole)
            found.append(GroupProgress(now_whole) if done == count else GroupProgress(before, now_whole, done))
        return tuple(found)

    def _write_block(
        self, request: SimRequest, index: int, layers: range, ranks: tuple[int, ...] | None = None
    ) -> None:
        shape = self.shape
        valid = min(shape.block_tokens, request.computed - index * shape.block_tokens or 0)
        if request.phase is Phase.LOADING:
            valid = shape.block_tokens
        for layer in layers:
            group = next(n for n in range(len(shape.group_layers)) if layer < shape.first_layer(n + 1))
            offset = shape.page(layer, request.blocks[group][index])
            for rank in range(shape.ranks) if ranks is None else ranks:
                page = page_stamp(shape, request.content, layer, index, rank, valid)
                self.memory[rank][offset : offset + shape.page_bytes] = page

    def _begin_lease(self, request: SimRequest) -> None:
        request.announced = 0  # also what the prefix cache gave is pinned with the first chunk
        request.lease = self.doorway.begin(
            request.handoff, digest_of(request), request.tokens, target=request.target, max_readers=request.max_readers
        )

    def _chunk_end(self, request: SimRequest) -> int:
        """Whole blocks only, until the last chunk takes the tail along."""
        if request.computed == request.tokens:
            return -(-request.tokens // self.shape.block_tokens)
        return request.computed // self.shape.block_tokens

    def _pin_chunk(self, request: SimRequest) -> None:
        assert request.lease is not None
        upto = self._chunk_end(request)
        fresh = tuple(tuple(ids[request.announced : upto]) for ids in request.blocks)
        self.pool.touch(self.doorway.pin(request.lease, fresh))

    def _finish_prefill(self, request: SimRequest) -> None:
        ticket = ""
        needed = -(-request.tokens // self.shape.block_tokens)
        blocks = tuple(tuple(ids[:needed]) for ids in request.blocks)
        if request.mode == "pull":
            ticket, pinned = self.doorway.grant(
                digest_of(request), request.tokens, blocks, max_readers=request.max_readers
            )
            self.pool.touch(pinned)
        if self.world.chance(self.put):
            self.world.faults["puts"] += 1
            self.pool.touch(self.doorway.put(blocks, (digest_of(request),)))
        request.lease = None
        self._finish(request, "prefilled", ticket)

    def _preempt(self, request: SimRequest) -> None:
        self.world.faults["preempted"] += 1
        if request.lease is not None:
            self.doorway.source_ended(request.lease, Reason.SOURCE_PREEMPTED)
            request.lease = None
            request.handoff = HandoffId("")
        self._free(request)
        request.computed = 0
        request.phase = Phase.WAITING

    def _start_decoding(self, request: SimRequest) -> None:
        request.phase = Phase.DECODING
        request.decode_left = self.world.rng.choice((1, 2, 3, 12))

    def _decode(self, request: SimRequest) -> None:
        request.decode_left -= 1
        if request.decode_left <= 0:
            self.check(request, "at the end")
            self._finish(request, "answered", "")

    # --- endings and checks

    def _finish(self, request: SimRequest, how: str, detail: str) -> None:
        self._remove(request)
        self.doorway.gave_up(request.id)
        request.on_end(how, detail)

    def _remove(self, request: SimRequest) -> None:
        self._free(request)
        del self.requests[request.id]
        if request.aborted:
            request.on_end("aborted", "")

    def _free(self, request: SimRequest) -> None:
        for ids in request.blocks:
            self.pool.drop(ids)
            self.own_refs -= len(ids)
        request.blocks = ()

    def check(self, request: SimRequest, when: str) -> None:
        """Every cell of the prompt is this prompt's."""
        self._check_tokens(request, request.tokens, when)

    def _check_tokens(self, request: SimRequest, tokens: int, when: str) -> None:
        shape = self.shape
        for group, count in enumerate(shape.group_layers):
            first = shape.first_layer(group)
            for index in range(-(-tokens // shape.block_tokens)):
                valid = min(shape.block_tokens, tokens - index * shape.block_tokens)
                block = request.blocks[group][index]
                for layer in range(first, first + count):
                    self._check_page(request, layer, index, block, valid, when)

    def _check_page(self, request: SimRequest, layer: int, index: int, block: int, valid: int, when: str) -> None:
        shape = self.shape
        offset = shape.page(layer, block)
        for rank, memory in enumerate(self.memory):
            page = memory[offset : offset + shape.page_bytes]
            if not same_tokens(
                shape, page, page_stamp(shape, request.content, layer, index, rank, shape.block_tokens), valid
            ):
                raise Broken(
                    WRONG, f"{self.name}: {request.id} {when}: layer {layer} block {index} is not this prompt's"
                )


def same_tokens(shape: Shape, page: bytes | bytearray, expected: bytes, valid: int) -> bool:
    """Whether the first `valid` tokens of a page are the expected ones."""
    if valid == shape.block_tokens:
        return page == expected
    heads, tokens = shape.rank_heads, shape.block_tokens
    for head in range(heads):
        for token in range(valid):
            cell = (head * tokens + token if shape.order == "HNP" else token * heads + head) * 4
            if page[cell : cell + 4] != expected[cell : cell + 4]:
                return False
    return True


def _nobody(how: str, detail: str) -> None:
    """The worker leaves; its clients have been told."""


def digest_of(request: SimRequest) -> bytes:
    return digest(Content((request.content, request.tokens), request.tokens))
