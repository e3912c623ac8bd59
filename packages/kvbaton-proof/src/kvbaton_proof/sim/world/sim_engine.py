"""A simulated engine: a block pool, a scheduler and devices with stamped memory, which drive the production sides.

It keeps the contract that vLLM's scheduler enforces (reference: invariants of the hooks): a load that was begun waits
for exactly one verdict, also after an abort; an unknown or second one is the death of an engine, and so is an exception
in a hook.

Laws: up to `depth` steps are in flight; what a request has computed is known when a step's output is taken, and outputs
are taken in order. Requests that end with a step end before the sides hear that it is computed, or after. Where bytes
may land that no step orders, a block that a step in flight writes is freed with that step's
output (rule 32).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbaton.api.params import Mode
from kvbaton.engines.side import guard
from kvbaton.engines.side.asks import ParamsSource, Target
from kvbaton.engines.side.protocols import NOT_YET, NOTHING, Answer, LoadVerdict
from kvbaton.node.doorway import DropBlocks, ForgetCached, LoadReport, MatchState, UnpinBlocks
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Groups
from kvbaton.protocol.ids import RequestId
from kvbaton_proof.sim.promises import DEATH, STRANGER, WRONG, Broken
from kvbaton_proof.sim.world.sim_device import Device, Step, Work
from kvbaton_proof.sim.world.sim_doorway import WatchedDoorway
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_pool import Pool, Prefixes, nothing_to_forget
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest, one_value
from kvbaton_proof.sim.world.sim_sides import CHUNKS, Announcer, Sides, judged, note_report
from kvbaton_proof.sim.world.sim_store import Fetching
from kvbaton_proof.sim.world.world import World

if TYPE_CHECKING:
    from kvbaton_proof.sim.world.sim_turns import EngineTurns

HIT = 0.2
"""Of prompts that come from elsewhere: the beginning is found in the prefix cache."""


class SimEngine:
    """One engine in one life."""

    def __init__(
        self, world: World, name: str, shape: Shape, doorway: WatchedDoorway, memory: list[bytearray], policy: str
    ) -> None:
        self.world, self.name, self.shape = world, name, shape
        self.doorway, self.policy = doorway, policy
        self.pool = Pool(shape.blocks, doorway, len(shape.group_layers))
        self.device = Device(world, name, shape, memory)
        self.announcer = Announcer(world, shape, doorway)
        self.device.on_layer, self.device.on_done = self.announcer.layer_done, doorway.wake_engine
        self.sides = Sides(world, shape, doorway, self.pool, self.device)
        self.prefill, self.decode = self.sides.prefill, self.sides.decode(recomputes=policy == "recompute")
        doorway.readers_of = lambda id: self.requests[id].max_readers if id in self.requests else 1
        self._hook_faults = guard.faults.total()
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
            self.decode.accepted(request, Target(Mode(request.mode), request.ticket))
        elif request.role == "prefill":
            self.prefill.accepted(request, ParamsSource(Mode(request.mode), request.ticket or None))
        if self.turns is not None:
            self.turns.added(request)

    def void(self) -> None:
        """What is under way is for its own request alone, and what is being loaded for nobody."""
        self.prefill.voided()
        self.decode.voided()
        for request in self.requests.values():
            if request.phase is Phase.LOADING:
                request.failed = End(Reason.ABORTED)
        for verdict in self.decode.take_verdicts():  # that it has not been told yet
            self._loaded(LoadVerdict(verdict.request_id, failed=True))

    def abort(self, id: RequestId) -> None:
        request = self.requests.get(id)
        if request is None or request.aborted:
            return
        request.aborted = True
        self.world.touch("aborted", *request.handoffs)
        self._left(request)
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
        if guard.faults.total() != self._hook_faults:
            raise Broken(DEATH, f"{self.name}: a hook failed; {dict(guard.faults)} since this process began")

    def preempt_all(self) -> None:
        self._do_duties()
        for request in self.requests.values():
            if request.phase in (Phase.PREFILLING, Phase.DECODING, Phase.FETCHING):
                self._preempt(request)

    def step_down(self) -> None:
        """The engine gives up every request before its process ends; what the door still holds comes back first."""
        for request in list(self.requests.values()):
            request.on_end = lambda how, detail: None  # the worker leaves; its clients have been told
            self._left(request)
        self._do_duties()

    @property
    def busy(self) -> bool:
        return bool(self.requests) or self.decode.busy or self.doorway.busy or self.doorway.turn_blocks > 0

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
        return self.own_refs + self.fetching.held_blocks + self.sides.kept_blocks

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
        for verdict in self.decode.take_verdicts():
            self._loaded(verdict)

    def _report(self, duty: LoadReport) -> None:
        note_report(self.name, self.requests.get(duty.request), duty)
        if self.turns is not None:
            self.turns.side.reported(duty)
        self.decode.reported(duty)

    def _loaded(self, verdict: LoadVerdict) -> None:
        request = judged(self.name, self.requests.get(RequestId(verdict.request_id)), verdict, self.shape.ranks)
        self.world.tell(f"{self.name} loaded {request.id} {request.failed.reason if request.failed else 'ok'}")
        if request.aborted:
            self._remove(request)
        elif verdict.is_good:
            self._landed(request)
        elif self.policy == "fail":
            self.finish(request, "failed", str(request.failed.reason if request.failed is not None else "no match"))
        else:
            self._compute_again(request, verdict.bad_blocks)

    def _landed(self, request: SimRequest) -> None:
        if not request.trusted:
            raise Broken(STRANGER, f"{self.name}: {request.id} was delivered on a forged ticket")
        request.computed = request.loads_upto
        self.decode.allocated(request, self.sides.tables(request), 0)
        if request.role == "decode":
            self._check_tokens(request, request.tokens, "as delivered")
            self._start_decoding(request)
        elif self.turns is not None:
            self.turns.taken(request)
            self._start_prefill(request)

    def _compute_again(self, request: SimRequest, bad_blocks: tuple[int, ...]) -> None:
        """What is proven good stays where it is, as vLLM does for one group."""
        good, size = request.failed.good_tokens if request.failed is not None else 0, self.shape.block_tokens
        request.failed, is_turn = None, request.role != "decode" and self.turns is not None
        if len(self.shape.group_layers) == 1 and not is_turn:  # also what is good of a block that is not all good
            self._check_tokens(request, good, "as proven good")
        if not bad_blocks:
            self._free(request)
            request.phase = Phase.WAITING
            return
        request.computed = min(request.blocks[0].index(block) for block in bad_blocks) * size
        if request.computed != good - good % size:
            raise Broken(WRONG, f"{self.name}: {request.id} goes on after {request.computed} tokens, {good} are good")
        if self.turns is not None and is_turn:
            self.turns.has_come(request, good)
        self.decode.allocated(request, self.sides.tables(request), 0)
        self._start_prefill(request)

    def _advance(self, request: SimRequest) -> list[Work]:
        """What the next step does for a request."""
        if request.phase is Phase.WAITING:
            self._schedule(request)
        if request.phase is Phase.PREFILLING:
            return self._prefill(request)
        return self._decode(request) if request.phase is Phase.DECODING else []

    def _schedule(self, request: SimRequest) -> None:
        if request.role == "prefill" and self.sides.is_put_off(request, self.on_wake):
            return
        local = self._found_here(request)
        tokens, is_loaded = self._match(request, local)
        if tokens is None or not self._allocate(request):
            return
        if is_loaded:
            self._load(request, local, tokens)
            return
        self.decode.allocated(request, self.sides.tables(request), 0)
        if not request.fetched and self.world.chance(self.get) and self.fetching.begin(request):
            request.fetched, request.phase = True, Phase.FETCHING
            return
        self._start_prefill(request)

    def _match(self, request: SimRequest, local: int) -> Answer:
        """How many tokens are to be loaded after the local ones. Not every request is looked at in every step."""
        answer = self.turns.match(request, local) if self.turns is not None else NOTHING
        if answer != NOTHING:
            return answer
        if self.early and self.doorway.waits(request.id) and not self.world.chance(self.early):
            return NOT_YET
        return self.sides.matched(request, self.decode.match(request, local))

    def _found_here(self, request: SimRequest) -> int:
        """Tokens that are in the prefix cache; of a D's prompt as if they were, all where a handoff is needless."""
        if not self.decode.is_accepted(request.id):
            return self.turns.found_here(request) if self.turns is not None else 0
        found = self.doorway._wants.get(request.id)
        if self.skips and found is not None and found.state is MatchState.FOUND and self.world.chance(self.skips):
            self.world.strike("not_needed", *request.handoffs)
            return request.tokens
        return self.world.rng.randrange(0, request.tokens, self.shape.block_tokens) if self.world.chance(HIT) else 0

    def _start_prefill(self, request: SimRequest) -> None:
        request.phase = Phase.PREFILLING
        if request.role == "prefill":  # where somebody reads behind it, its lease begins
            self.prefill.begun(request)

    def _fetched(self, request: SimRequest, blocks: int, turn: int) -> None:
        """A store's bytes are at rest in the first `blocks` blocks; or, if there are none, it did not have them."""
        if request.id in self.requests and request.turn == turn:
            request.computed = blocks * self.shape.block_tokens
            self._start_prefill(request)
        self.on_wake()

    def _allocate(self, request: SimRequest) -> bool:
        counts = self.sides.grouping.needed(request.most_tokens)
        if len(self.pool.free) < sum(counts):
            self.world.touch("no_room", *request.handoffs)
            return False
        found = self.prefixes.of(request) if request.role == "prefill" else [[] for _ in counts]
        for ids in found:  # of all groups, before a fresh block of one is taken from what another has found
            self.pool.revive(ids)
        self.pool.prefer(request.prefers)
        request.blocks = tuple([*ids, *self._fresh(counts[group] - len(ids), group)] for group, ids in enumerate(found))
        request.computed = len(found[0]) * self.shape.block_tokens
        self.own_refs += sum(counts)
        return True

    def _fresh(self, count: int, group: int) -> list[int]:
        blocks = self.pool.allocate(count)
        self.device.handed_out(blocks, group)
        return blocks

    def _load(self, request: SimRequest, local: int, tokens: int) -> None:
        """It has blocks, and waits for a verdict from here on."""
        request.phase, request.reported = Phase.LOADING, set()
        request.first_token, request.loads_upto = local, local + tokens
        if self.turns is not None and self.turns.allocated(request, tokens):
            return
        for rank in range(self.shape.ranks) if local else ():
            for layer in self.shape.own_layers[rank]:
                self.device.write(request.content, request.blocks, 0, local, rank, layer)
        if self.doorway.waits(request.id):  # P has it all: its answer will find the blocks taken
            self.world.faults["early_blocks"] += 1
        self.decode.allocated(request, self.sides.tables(request), tokens)

    # --- computing

    def _prefill(self, request: SimRequest) -> list[Work]:
        """The next chunk; what it adds to a lease is pinned before it is issued."""
        if request.computed == request.tokens:
            return []
        if request.role == "prefill" and self.world.chance(self.preempt):
            self._preempt(request)
            return []
        first = request.computed
        stop, leaving = min(request.tokens, first + self.world.rng.choice(CHUNKS)), None
        if request.role == "prefill":
            leaving = self.sides.scheduled(self._last_step + 1, request, stop - first)
        request.computed = stop
        if request.role == "prefill":
            self.prefixes.publish(request)
        work = Work(request, request.blocks, first, stop, request.turn, leaving)
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
        if work.moves_states:
            self.sides.scheduled(self._last_step + 1, request, 1)
        request.decoded += 1
        work.is_checked = request.decode_issued == request.decode_left
        return [work]

    def _issue(self, works: list[Work]) -> None:
        if works:
            self._last_step += 1
            self._in_flight.append(self.device.issue(self._last_step, works))

    def _take_outputs(self) -> None:
        while self._in_flight and self._in_flight[0].done:
            step, is_told_first = self._in_flight.popleft(), self.world.chance(0.5)
            if is_told_first:
                self.prefill.computed(step.number)
            for work in step.works:
                request = work.request
                if self.requests.get(request.id) is request and request.turn == work.turn:
                    self._output(work)
            if not is_told_first:
                self.prefill.computed(step.number)
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
        if work.stop == request.tokens:
            self._prefilled(request)

    def _prefilled(self, request: SimRequest) -> None:
        goes_on = self.overwrites and self.sides.goes_on(request) and self.world.chance(self.overwrites)
        if request.role == "prefill" and not goes_on:
            self._finish_prefill(request)
            return
        self._start_decoding(request)
        if goes_on:
            self.world.strike("overwritten", *request.handoffs)
            request.decode_left = 1

    def _finish_prefill(self, request: SimRequest) -> None:
        if request.id not in self.prefill.refused and self.world.chance(self.put):
            self.put_away(request)
        answer = self.prefill.finished(request, self.sides.tables(request), well=True) or {}
        if request.mode == "pull" or "refused" in answer:
            ticket = str(answer.get("ticket") or "")
            self.finish(request, "prefilled" if ticket else "failed", ticket or str(answer.get("refused", "not kept")))
        else:
            self.finish(request, "prefilled", "")

    def put_away(self, request: SimRequest) -> None:
        """Into the store."""
        self.world.faults["puts"] += 1
        blocks = tuple(map(tuple, self._listed(request)))
        self.put_prompts[blocks] = request
        self.pool.touch(self.doorway.put(*self.values_of(request, blocks)))

    def _listed(self, request: SimRequest) -> list[list[int]]:
        """The blocks of a prompt that its KV is in, without those that left a window."""
        needed = -(-request.tokens // self.shape.block_tokens)
        return [self.shape.listed(group, ids[:needed], request.tokens) for group, ids in enumerate(request.blocks)]

    def _preempt(self, request: SimRequest) -> None:
        self.world.strike("preempted", *request.handoffs)
        self.prefill.preempted(request.id)
        self._free(request)
        request.phase = Phase.WAITING
        self.on_wake()

    def _start_decoding(self, request: SimRequest) -> None:
        request.phase, request.decode_issued = Phase.DECODING, 0
        request.decode_left = self.world.rng.choice((1, 2, 3, 12))

    # --- endings and checks

    def finish(self, request: SimRequest, how: str, detail: str) -> None:
        self._left(request, well=how in ("answered", "prefilled"))
        self._remove(request)
        request.on_end(how, detail)

    def _left(self, request: SimRequest, *, well: bool = False) -> None:
        """It is over, but for a load whose verdict is still to come."""
        if self.turns is not None:
            self.turns.finished(request, well=well)
        self.decode.finished(request)
        if request.role == "prefill" and not well:
            self.prefill.finished(request, self.sides.tables(request), well=False)
        self.sides.admission.left(request)

    def _remove(self, request: SimRequest) -> None:
        self._free(request)
        del self.requests[request.id]
        if request.aborted:
            request.on_end("aborted", "")

    def _free(self, request: SimRequest) -> None:
        """Give a request's blocks back: with the output of the last step in flight where that may still write them."""
        blocks = [block for ids in request.blocks for block in ids]
        request.blocks, request.computed, request.decoded = (), 0, 0
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
