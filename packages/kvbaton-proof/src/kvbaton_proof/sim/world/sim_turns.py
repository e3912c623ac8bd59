"""Turns in a simulated world: engines that keep and take them, and clients whose conversations go on.

The next turn's prompt is the content of the one before with more tokens, so what was taken is checked cell by cell.
Laws: what is kept pins at most its share after every step; a turn that was taken is this prompt's. All chance is the
world's, and only worlds in which conversations go on know of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvbaton.node.turn_keeping import TurnKeeper, TurnSettings, TurnTaker
from kvbaton.protocol.ids import HandoffId, RequestId, TransferId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.promises import HANG, LEAK, NEEDLESS, Broken
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest, digest_for, digest_of
from kvbaton_proof.sim.world.sim_router import Errand
from kvbaton_proof.sim.world.touches import TICKET_KEY, handoff_of, opened

if TYPE_CHECKING:
    from kvbaton_proof.sim.cluster import Cluster
    from kvbaton_proof.sim.world.life import Life
    from kvbaton_proof.sim.world.sim_engine import SimEngine

TOKENS_MAX = 20
GOES_ON = 0.8
OTHER_WORDS = 0.1
TURN_S = (0.3, 1.0, 4.0)
SHORT_S = 2.0
"""Longer than what was let go of is on its way back, and than an engine is stopped."""
STEP_S = 0.1
"""How often an engine steps whose requests can only wait: it does not sleep, whether or not there is news."""
EARLY = 0.8
"""The share of the time that a turn is kept within which the next one surely comes."""
PERCENTS = (10.0, 25.0, 60.0, 100.0)


class EngineTurns:
    """Of one engine in one life."""

    def __init__(self, engine: SimEngine, settings: TurnSettings) -> None:
        self.keeper = TurnKeeper(engine.doorway, settings, engine.shape.blocks)
        self.taker = TurnTaker(engine.doorway)
        self._engine = engine
        let_go = engine.doorway.let_go

        def going(handoff: HandoffId) -> None:
            engine.world.touch("turn_let_go", handoff)
            let_go(handoff)

        engine.doorway.let_go = going  # type: ignore[method-assign]
        self._most = engine.shape.blocks * settings.turn_percent / 100
        self._steps_on = False
        self._short: dict[RequestId, float] = {}  # requests that found too few blocks while turns were kept, since when

    def added(self, request: SimRequest) -> None:
        if request.offer is not None:
            ticket, tokens = request.offer
            content = request.content
            self.taker.ask(request.id, ticket, tokens, request.tokens, lambda upto: digest_for(content, upto))
            found = opened(ticket)
            is_elsewhere = found is not None and found.source != self._engine.name
            if is_elsewhere and 1 < tokens <= request.tokens and not self.taker.awaits(request.id):
                raise Broken(NEEDLESS, f"{self._engine.name}: {request.id} does not ask for the turn that is offered")

    def step(self) -> None:
        """Before requests are looked at."""
        self.keeper.press(len(self._engine.pool.free))
        pinned = self._engine.doorway.turn_blocks
        if pinned > self._most:
            raise Broken(LEAK, f"{self._engine.name}: turns pin {pinned} blocks, of {self._most:g} that they may")

    def check_waiting(self, request: SimRequest, needed: int) -> None:
        """All turns go before a request waits for blocks, but for those that are being read (rule 34)."""
        engine, now = self._engine, self._engine.world.now
        idle = [turn for turn in self.keeper._kept.values() if not turn.going]
        if not idle or len(engine.pool.free) >= needed:
            self._short.pop(request.id, None)
        elif now - self._short.setdefault(request.id, now) > SHORT_S:
            raise Broken(HANG, f"{engine.name}: {request.id} waits for blocks while {len(idle)} turns keep theirs")
        elif not self._steps_on:
            self._steps_on = True
            engine.world.after(STEP_S, self._step_on)

    def _step_on(self) -> None:
        self._steps_on = False
        self._engine.on_wake()

    def check_rest(self) -> None:
        """No request is left, so nothing is asked for."""
        if self.taker._asked:
            raise Broken(LEAK, f"{self._engine.name}: turns are waited for by {list(self.taker._asked)[:3]}")

    def schedules(self, request: SimRequest) -> bool:
        """Whether a turn decides about this request now: D has not answered, or it is loaded."""
        engine = self._engine
        needed = -(-(request.tokens + 1) // engine.shape.block_tokens) * len(engine.shape.group_layers)
        self.keeper.press(len(engine.pool.free), needed)
        self.check_waiting(request, needed)
        if not self.taker.awaits(request.id):
            return False
        late = self.taker.loads["late"]
        found = self.taker.match(request.id, 0, 1)
        if self.taker.loads["late"] > late:
            engine.world.touch("not_needed", *request.handoffs)
        if not found:
            return found is None
        if not engine._allocate(request):
            return True
        position, local = found, request.computed
        if self.taker.match(request.id, local, 1) == 0:  # as much is here
            engine.world.touch("not_needed", *request.handoffs)
            engine._start_prefill(request)
            return True
        first, upto = self.taker.first_token(request.id, position - local)
        request.phase, request.first_token, request.reported = Phase.LOADING, first, set()
        size = engine.shape.block_tokens
        wanted = tuple(tuple(ids[first // size : -(-upto // size)]) for ids in request.blocks)
        held = engine.doorway.allocated(request.id, wanted, first)
        engine.device.check_quiet(held)
        engine.pool.hold(held)
        engine.world.faults["turns_loaded"] += 1
        return True

    def loaded(self, request: SimRequest) -> bool:
        """Whether it was a turn that has come to its end."""
        if not self.taker.is_loading(request.id):
            return False
        upto, engine, failed = self.taker.upto(request.id), self._engine, request.failed
        self.taker.loaded(request.id, failed.reason if failed is not None else None)
        request.failed = None
        if request.aborted:
            engine._remove(request)
        elif failed is None:
            self._has_come(request, upto)
            request.computed = upto
            engine.world.faults["turns_taken"] += 1
            engine._start_prefill(request)
        else:
            engine._free(request)
            request.phase = Phase.WAITING
        return True

    def ended(self, request: SimRequest) -> None:
        """An answer is complete: its prompt's blocks are kept, if they may be."""
        if not request.keep:
            return
        engine = self._engine
        self._is_there(request, request.tokens, "as kept for the next turn")
        blocks = tuple(map(tuple, engine._listed(request)))
        room = self._most - engine.doorway.turn_blocks - sum(map(len, blocks))
        engine.pool.before_pin([block for ids in blocks for block in ids])
        kept = self.keeper.keep(request.keep, digest_of(request), request.tokens, blocks, request.id)
        engine.pool.touch(kept)
        ticket = opened(request.keep)
        is_over = ticket is not None and ticket.expires_unix_s <= engine.doorway.config.wall()
        if not kept and room >= 0 and not is_over:
            raise Broken(NEEDLESS, f"{engine.name}: {request.id} is not kept for the next turn, with room for it")
        if not kept:
            engine.world.touch("turn_unkept", handoff_of(request.keep))

    def _has_come(self, request: SimRequest, upto: int) -> None:
        """Of what lay here before, a step in flight may still compute a part: then the next step looks at it."""
        device, size = self._engine.device, self._engine.shape.block_tokens
        first = -(-request.first_token // size)
        if not any(device.writing[block] for ids in request.blocks for block in ids[:first]):
            self._is_there(request, upto, "as taken from the turn before")
            return
        request.fetched = True
        for blank in device.blank:
            blank.difference_update(block for ids in request.blocks for block in ids[first : -(-upto // size)])

    def _is_there(self, request: SimRequest, tokens: int, when: str) -> None:
        """What was loaded is as good as computed, once it has been looked at."""
        engine = self._engine
        engine._check_tokens(request, tokens, when)
        upto = -(-tokens // engine.shape.block_tokens)
        for blank in engine.device.blank:
            blank.difference_update(block for ids in request.blocks for block in ids[:upto])


class Conversations:
    """Clients who come back with what they were told, and more."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        rng = cluster.world.rng
        self._settings = TurnSettings(rng.choice(TURN_S), rng.choice(PERCENTS))

    def equip(self, life: Life) -> None:
        life.engine.turns = EngineTurns(life.engine, self._settings)

    def ticket(self, life: Life) -> tuple[HandoffId, str]:
        handoff = handoff_id(TransferId(f"{self._cluster.world.rng.getrandbits(128):032x}"))
        return handoff, self._sealed(handoff, life, "")

    def answered(self, index: int, life: Life, content: int, tokens: int, handoff: HandoffId) -> None:
        """A client has its answer, and may go on."""
        cluster, rng = self._cluster, self._cluster.world.rng
        more = tokens + rng.randint(1, 6)
        if cluster.healed or more > TOKENS_MAX or rng.random() > GOES_ON:
            return
        thinks_s = rng.uniform(0.01, 1.5)
        if thinks_s > EARLY * self._settings.turn_s:
            cluster.world.touch("late_turn", handoff)
        cluster.world.after(thinks_s, partial(self._go_on, index, life, content, tokens, more, handoff))

    def _go_on(self, index: int, kept_by: Life, content: int, had: int, tokens: int, handoff: HandoffId) -> None:
        cluster, world = self._cluster, self._cluster.world
        ring = cluster.members is not None
        sources = [each.name for each in cluster.plan.prefill] if not ring else cluster.others(kept_by.peer.worker)
        source = cluster._chosen(sources)
        target = cluster._chosen(cluster.others(source.peer.worker))
        if world.chance(OTHER_WORDS):
            content += 200_000
            world.touch("ticket_other_prompt", handoff)
        ticket = self._sealed(handoff, kept_by, source.peer.worker)

        def prefilled(how: str, given: str) -> None:
            if how == "prefilled":
                errand = Errand(source.peer.worker, given, 1)
                delay = world.rng.uniform(0.001, 0.1)
                world.after(delay, partial(cluster._decode, index, target, content, tokens, "pull", errand))

        world.faults["turns_offered"] += 1
        cluster.add(index, source, content, tokens, "prefill", prefilled, offer=(ticket, had + 1))

    def _sealed(self, handoff: HandoffId, life: Life, target: str) -> str:
        peer = life.peer
        expires = self._cluster.world.now + 30.0
        return seal(
            Ticket(handoff, peer.worker, expires, peer.incarnation, target=type(peer.worker)(target)), TICKET_KEY
        )
