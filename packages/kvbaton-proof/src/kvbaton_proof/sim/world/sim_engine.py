"""A simulated engine: a block pool, a scheduler and devices with stamped memory, behind the production `Doorway`.

It keeps the contract that vLLM's scheduler enforces (reference: invariants of the hooks): a load that was begun waits
for exactly one report per rank, also after an abort; an unknown or second report is the death of an engine.

Laws: up to `depth` steps are in flight; what a request has computed is known when a step's output is taken, and outputs
are taken in order. A chunk is announced with its step's output, a layer by the event behind that layer on that rank
(rule 30). Where bytes may land that no step orders, a block that a step in flight writes is freed with that step's
output (rule 32).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbaton.node.doorway import Doorway, DropBlocks, ForgetCached, LoadReport, MatchState, UnpinBlocks
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Groups
from kvbaton.protocol.ids import HandoffId, RequestId
from kvbaton_proof.sim.promises import DEATH, STRANGER, Broken
from kvbaton_proof.sim.world.sim_admission import is_put_off
from kvbaton_proof.sim.world.sim_announcing import Announcer
from kvbaton_proof.sim.world.sim_device import Device, Step, Work
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_pool import Pool, Prefixes, nothing_to_forget
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest, digest_of, one_value
from kvbaton_proof.sim.world.sim_store import Fetching
from kvbaton_proof.sim.world.world import World

if TYPE_CHECKING:
    from kvbaton_proof.sim.world.sim_turns import EngineTurns


class SimEngine:
    """One engine in one life."""

    def __init__(
        self, world: World, name: str, shape: Shape, doorway: Doorway, memory: list[bytearray], policy: str
    ) -> None:
        self.world, self.name, self.shape = world, name, shape
        self.doorway, self.policy = doorway, policy
        self.pool = Pool(shape.blocks, doorway, len(shape.group_layers))
        self.device = Device(world, name, shape, memory)
        self.announcer = Announcer(world, shape, doorway)
        self.device.on_layer, self.device.on_done = self.announcer.layer_done, doorway.wake_engine
        self.fetching = Fetching(world, self.pool, self.device, self._fetched)
        self.requests: dict[RequestId, SimRequest] = {}
        self.prefixes = Prefixes(shape, self.pool.reuses)
        self.own_refs = self._last_step = 0
        self.replacing, self.depth, self.defers = False, 1, True  # frees wait for the steps that were in flight
        self.preempt = self.put = self.get = self.early = self.skips = self.overwrites = 0.0  # shares of requests
        self.on_wake: Callable[[], None] = doorway.wake_engine
        self.on_forget: Callable[[ForgetCached], None] = nothing_to_forget
        self.put_prompts: dict[Groups, SimRequest] = {}  # by their blocks: while these are put, they are no other's
        self.values_of: Callable[[SimRequest, Groups], tuple[Groups, tuple[bytes, ...]]] = one_value
        self._in_flight: deque[Step] = deque()
        self._deferred: deque[tuple[int, list[int]]] = deque()  # (the last step that may write there, blocks)
        self.turns: EngineTurns | None = None  # where conversations go on

    # --- requests

    def add(self, request: SimRequest) -> None:
        self.requests[request.id] = request
        if request.role == "decode" and request.ticket:
            self.doorway.want(
                request.id, request.ticket, digest_of(request), request.tokens, push=request.mode == "push"
            )
        if self.turns is not None:
            self.turns.added(request)

    def abort(self, id: RequestId) -> None:
        request = self.requests.get(id)
        if request is None or request.aborted:
            return
        request.aborted = True
        self.world.touch("aborted", *request.handoffs)
        if request.lease is not None:
            self.doorway.source_ended(request.lease, Reason.SOURCE_ABORTED)
            request.lease = None
        self.doorway.gave_up(id)
        if request.phase is not Phase.LOADING:
            self._remove(request)

    # --- one step

    def step(self) -> None:
        """Take the outputs that have come, and issue the next step if there is room for one more in flight."""
        self._do_duties()
        self.fetching.poll()
        if self.turns is not None:
            self.turns.step()
        self._take_outputs()
        if len(self._in_flight) < self.depth and not self.replacing:
            self._issue([work for request in list(self.requests.values()) for work in self._advance(request)])
        self._do_duties()

    def preempt_all(self) -> None:
        self._do_duties()
        for request in self.requests.values():
            if request.phase in (Phase.PREFILLING, Phase.DECODING, Phase.FETCHING):
                self._preempt(request)

    def step_down(self) -> None:
        """The engine gives up every request before its process ends; what the door still holds comes back first."""
        for request in list(self.requests.values()):
            request.on_end = lambda how, detail: None  # the worker leaves; its clients have been told
            self.doorway.gave_up(request.id)
        self._do_duties()

    def stop(self) -> None:
        self.device.stopped = True

    @property
    def busy(self) -> bool:
        return bool(self.requests) or self.doorway.busy or self.doorway.turn_blocks > 0

    @property
    def at_rest(self) -> bool:
        """Nothing lands in any block, and no block waits to be free."""
        return not (self._in_flight or self._deferred or self.fetching.open)

    @property
    def has_next(self) -> bool:
        """Whether a step could be issued now."""
        active = (Phase.PREFILLING, Phase.DECODING)
        return len(self._in_flight) < self.depth and any(r.phase in active for r in self.requests.values())

    @property
    def held_refs(self) -> int:
        """References of the engine itself: of its requests, of what a store's bytes land in, and frees that wait."""
        return self.own_refs + self.fetching.held_blocks

    def _do_duties(self) -> None:
        for duty in self.doorway.duties():
            if isinstance(duty, UnpinBlocks):
                self.pool.unpin(duty.blocks)
            elif isinstance(duty, DropBlocks):
                self.pool.let_go(duty.blocks)
            elif isinstance(duty, LoadReport):
                self._report(duty)
            else:
                self.on_forget(duty)

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
        if self.turns is not None and self.turns.loaded(request):
            return
        if request.aborted:
            self._remove(request)
        elif request.failed is None:
            if not request.trusted:
                raise Broken(STRANGER, f"{self.name}: {request.id} was delivered on a forged ticket")
            self._check_tokens(request, request.tokens, "as delivered")
            request.computed = request.tokens
            self._start_decoding(request)
        elif self.policy == "fail":
            self.finish(request, "failed", str(request.failed.reason))
        else:
            self._keep_good_prefix(request)

    def _keep_good_prefix(self, request: SimRequest) -> None:
        """Recompute; what is proven good stays where it is, as vLLM does for one group."""
        assert request.failed is not None
        good, alone = request.failed.good_tokens, len(self.shape.group_layers) == 1
        if alone:  # also what is good of a block that is not all good
            self._check_tokens(request, good, "as proven good")
            good -= good % self.shape.block_tokens
        if alone and good > request.first_token:
            request.computed = good
            request.phase = Phase.PREFILLING
        else:
            self._free(request)
            request.phase = Phase.WAITING

    def _advance(self, request: SimRequest) -> list[Work]:
        """What the next step does for a request."""
        if request.phase is Phase.WAITING:
            self._schedule(request)
        if request.phase is Phase.PREFILLING:
            return self._prefill(request)
        return self._decode(request) if request.phase is Phase.DECODING else []

    def _schedule(self, request: SimRequest) -> None:
        if request.role == "prefill" and is_put_off(self, request):
            return
        if self.turns is not None and self.turns.schedules(request):
            return
        if request.role == "decode" and request.ticket and not request.remote_done:
            match = self.doorway.match(request.id)
            if match.state is MatchState.NOT_YET:
                if match.computed and self.world.chance(self.early):
                    self.world.faults["early_blocks"] += 1
                    self._load(request)  # P has it all: its answer will find the blocks taken
                return
            if match.state is MatchState.FOUND:
                if self.skips and self.world.chance(self.skips):
                    self.world.strike("not_needed", *request.handoffs)
                    self.doorway.not_needed(request.id)
                    request.remote_done = True
                else:
                    self._load(request)
                return
            request.remote_done = True
            self.world.tell(f"{self.name} no match {request.id} {match.end.reason if match.end else ''}")
            if self.policy == "fail" and match.end is not None:
                self.finish(request, "failed", str(match.end.reason))
                return
        if not self._allocate(request):
            return
        if not request.fetched and self.world.chance(self.get) and self.fetching.begin(request):
            request.fetched, request.phase = True, Phase.FETCHING
            return
        self._start_prefill(request)

    def _start_prefill(self, request: SimRequest) -> None:
        request.phase = Phase.PREFILLING
        if request.handoff and request.role == "prefill":
            self.begin_lease(request)

    def _fetched(self, request: SimRequest, blocks: int, turn: int) -> None:
        """A store's bytes are at rest in the first `blocks` blocks; or, if there are none, it did not have them."""
        if request.id in self.requests and request.turn == turn:
            request.computed = blocks * self.shape.block_tokens
            self._start_prefill(request)
        self.on_wake()

    def _allocate(self, request: SimRequest) -> bool:
        shape = self.shape
        per_group, groups = -(-(request.tokens + 1) // shape.block_tokens), len(shape.group_layers)
        counts = [1 if group in shape.states else per_group for group in range(groups)]
        if len(self.pool.free) < sum(counts):
            self.world.touch("no_room", *request.handoffs)
            return False
        found = self.prefixes.of(request) if request.role == "prefill" else [[] for _ in range(groups)]
        for ids in found:  # of all groups, before a fresh block of one is taken from what another has found
            self.pool.revive(ids)
        self.pool.prefer(request.prefers)
        request.blocks = tuple([*ids, *self._fresh(counts[group] - len(ids), group)] for group, ids in enumerate(found))
        request.computed = len(found[0]) * shape.block_tokens
        self.own_refs += sum(counts)
        return True

    def _fresh(self, count: int, group: int) -> list[int]:
        blocks = self.pool.allocate(count)
        self.device.handed_out(blocks, group)
        return blocks

    def _load(self, request: SimRequest) -> None:
        if not self._allocate(request):
            return
        request.remote_done = True
        request.phase = Phase.LOADING
        block_tokens = self.shape.block_tokens
        have = self.world.rng.randrange(0, request.tokens, block_tokens) if self.world.chance(0.2) else 0
        request.first_token = have
        if have:  # as if found in the prefix cache
            for rank in range(self.shape.ranks):
                for layer in self.shape.own_layers[rank]:
                    self.device.write(request.content, request.blocks, 0, have, rank, layer)
        wanted = tuple(
            tuple(ids if group in self.shape.states else ids[have // block_tokens :])
            for group, ids in enumerate(self._listed(request))
        )
        held = self.doorway.allocated(request.id, wanted, have)
        self.device.check_quiet(held)
        self.pool.hold(held)

    # --- computing

    def _prefill(self, request: SimRequest) -> list[Work]:
        """The next chunk; its blocks are pinned before it is issued."""
        if request.computed == request.tokens:
            return []
        if request.role == "prefill" and self.world.chance(self.preempt):
            self._preempt(request)
            return []
        first, had = request.computed, request.pinned
        request.computed = min(request.tokens, first + self.world.rng.choice((2, 4, 8, 16)))
        if request.lease is not None:
            self._pin_chunk(request)
        if request.role == "prefill":
            self.prefixes.publish(request)
        work = Work(request, request.blocks, first, request.computed, request.turn, request.lease, had, request.pinned)
        work.is_checked = request.fetched
        return [work]

    def _decode(self, request: SimRequest) -> list[Work]:
        """One more token. That a request is over is known with its last output: steps too many may be in flight."""
        if self.world.chance(self.preempt):
            self._preempt(request)
            return []
        request.decode_issued += 1
        work = Work(request, request.blocks, request.tokens, request.tokens + 1, request.turn)
        work.moves_states = request.role == "prefill"  # which were granted
        self.pool.overwritten(request.blocks[group][0] for group in self.shape.states if work.moves_states)
        work.is_checked = request.decode_issued == request.decode_left
        return [work]

    def _issue(self, works: list[Work]) -> None:
        if works:
            self._last_step += 1
            self._in_flight.append(self.device.issue(self._last_step, works))

    def _take_outputs(self) -> None:
        while self._in_flight and self._in_flight[0].done:
            step = self._in_flight.popleft()
            for work in step.works:
                request = work.request
                if self.requests.get(request.id) is request and request.turn == work.turn:
                    self._output(work)
            while self._deferred and self._deferred[0][0] <= step.number:
                self._let_go(self._deferred.popleft()[1])

    def _output(self, work: Work) -> None:
        request = work.request
        if request.phase is Phase.DECODING:
            request.decode_left -= 1
            request.decode_issued -= 1
            if request.decode_left <= 0:
                self._finish_prefill(request) if request.role == "prefill" else self.finish(request, "answered", "")
            return
        self.announcer.chunk_done(work)
        if work.stop == request.tokens:
            self._prefilled(request)

    def _prefilled(self, request: SimRequest) -> None:
        goes_on = self.overwrites and request.lease is not None and self.world.chance(self.overwrites)
        if request.role == "prefill" and not goes_on:
            self._finish_prefill(request)
            return
        self._start_decoding(request)
        if goes_on:
            self.world.strike("overwritten", *request.handoffs)
            request.decode_left = 1

    def begin_lease(self, request: SimRequest) -> None:
        request.pinned = 0  # also what the prefix cache gave is pinned with the first chunk
        request.lease = self.doorway.begin(
            request.handoff, digest_of(request), request.tokens, target=request.target, max_readers=request.max_readers
        )
        self.doorway.budget.begun(request.lease, request.id)

    def _chunk_end(self, request: SimRequest) -> int:
        """Whole blocks only, until the last chunk takes the tail along."""
        if request.computed == request.tokens:
            return -(-request.tokens // self.shape.block_tokens)
        return request.computed // self.shape.block_tokens

    def _pin_chunk(self, request: SimRequest) -> None:
        assert request.lease is not None
        upto = self._chunk_end(request)
        ended = request.computed == request.tokens  # a state is pinned with the end
        fresh = tuple(
            tuple(ids[: int(ended)] if group in self.shape.states else ids[request.pinned : upto])
            for group, ids in enumerate(self._listed(request))
        )
        self.pool.before_pin([block for ids in fresh for block in ids])
        self.pool.touch(self.doorway.pin(request.lease, fresh))
        request.pinned = upto
        if self.announcer.lists_early and request.computed == request.tokens:
            self.doorway.completed(request.lease)

    def _finish_prefill(self, request: SimRequest) -> None:
        ticket = ""
        blocks = tuple(map(tuple, self._listed(request)))
        if request.mode == "pull":
            self.pool.before_pin([block for ids in blocks for block in ids])
            ticket, pinned = self.doorway.grant(
                digest_of(request), request.tokens, blocks, max_readers=request.max_readers
            )
            self.pool.touch(pinned)
        if self.world.chance(self.put):
            self.world.faults["puts"] += 1
            self.put_prompts[blocks] = request
            self.pool.touch(self.doorway.put(*self.values_of(request, blocks)))
        request.lease = None
        self.finish(request, "prefilled", ticket)

    def _listed(self, request: SimRequest) -> list[list[int]]:
        """The blocks of a prompt that its KV is in, without those that left a window."""
        needed = -(-request.tokens // self.shape.block_tokens)
        return [self.shape.listed(group, ids[:needed], request.tokens) for group, ids in enumerate(request.blocks)]

    def _preempt(self, request: SimRequest) -> None:
        self.world.strike("preempted", *request.handoffs)
        if request.lease is not None:
            self.doorway.source_ended(request.lease, Reason.SOURCE_PREEMPTED)
            request.lease = None
            request.handoff = HandoffId("")
        self._free(request)
        request.phase = Phase.WAITING
        self.on_wake()

    def _start_decoding(self, request: SimRequest) -> None:
        request.phase, request.decode_issued = Phase.DECODING, 0
        request.decode_left = self.world.rng.choice((1, 2, 3, 12))

    # --- endings and checks

    def finish(self, request: SimRequest, how: str, detail: str) -> None:
        if how == "answered" and self.turns is not None:
            self.turns.ended(request)
        self._remove(request)
        self.doorway.gave_up(request.id)
        request.on_end(how, detail)

    def _remove(self, request: SimRequest) -> None:
        self._free(request)
        self.doorway.budget.left(request.id)
        del self.requests[request.id]
        if self.turns is not None:
            self.turns.taker.forget(request.id)
        if request.aborted:
            request.on_end("aborted", "")

    def _free(self, request: SimRequest) -> None:
        """Give a request's blocks back: with the output of the last step in flight where that may still write them."""
        blocks = [block for ids in request.blocks for block in ids]
        request.blocks, request.computed = (), 0
        request.turn += 1
        if self.defers and self._in_flight:
            self._deferred.append((self._last_step, blocks))
        else:
            self._let_go(blocks)

    def _let_go(self, blocks: list[int]) -> None:
        if self.defers:  # else whoever gets them writes in the order of the steps, and nothing is loaded
            self.device.check_quiet([block for block in blocks if self.pool.refs[block] == 1])  # nobody else's prefix
        self.pool.drop(blocks)
        self.own_refs -= len(blocks)

    def _check_tokens(self, request: SimRequest, tokens: int, when: str) -> None:
        """Every cell of the prompt is this prompt's."""
        ranks, layers = range(self.shape.ranks), range(self.shape.layers)
        self.device.check(request.content, request.blocks, tokens, ranks, layers, f"{request.id} {when}")
