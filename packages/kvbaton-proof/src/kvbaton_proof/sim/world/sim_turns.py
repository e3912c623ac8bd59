"""Turns in a simulated world: engines that keep and take them, and clients whose conversations go on.

The next turn's prompt is the content of the one before with more tokens, so what was taken is checked cell by cell.
Laws: what is kept pins at most its share after every step; a turn that was taken is this prompt's. All chance is the
world's, and only worlds in which conversations go on know of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvbaton.api.params import TurnOffer
from kvbaton.engines.side.protocols import Answer
from kvbaton.engines.side.turns import TurnSide
from kvbaton.node.turn_keeping import TurnSettings
from kvbaton.protocol.ids import HandoffId, RequestId, TransferId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.promises import HANG, LEAK, NEEDLESS, Broken
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.sim_router import Errand
from kvbaton_proof.sim.world.sim_sides import SimRequests
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
    """The production half of one engine in one life, and what must come of it."""

    def __init__(self, engine: SimEngine, settings: TurnSettings) -> None:
        sides, blocks = engine.sides, engine.shape.blocks
        self.side = TurnSide(
            engine.doorway,
            sides.pins,
            sides.grouping,
            SimRequests(),
            engine.decode,
            settings,
            blocks_total=blocks,
            takes=engine.policy == "recompute",
        )
        self.keeper, self.taker = self.side.keeper, self.side.taker
        sides.on_refused = self.side.refused
        self._engine = engine
        let_go = engine.doorway.let_go

        def going(handoff: HandoffId) -> None:
            engine.world.touch("turn_let_go", handoff)
            let_go(handoff)

        engine.doorway.let_go = going  # type: ignore[method-assign]
        self._most = blocks * settings.turn_percent / 100
        self._steps_on = False
        self._short: dict[RequestId, float] = {}  # requests that found too few blocks while turns were kept, since when

    def added(self, request: SimRequest) -> None:
        if request.offer is None:
            return
        ticket, tokens = request.offer
        self.side.asked(request, TurnOffer(ticket, tokens))
        found, engine = opened(ticket), self._engine
        is_elsewhere = found is not None and found.source != engine.name and engine.policy == "recompute"
        if is_elsewhere and 1 < tokens <= request.tokens and not self.taker.awaits(request.id):
            raise Broken(NEEDLESS, f"{engine.name}: {request.id} does not ask for the turn that is offered")

    def step(self) -> None:
        """Before requests are looked at."""
        asked, engine = set(self.taker._asked), self._engine
        self.side.do_duties()
        for id in asked.difference(self.taker._asked):
            engine.world.touch("not_needed", *engine.requests[id].handoffs)
        if engine.doorway.turn_blocks > self._most:
            what = f"turns pin {engine.doorway.turn_blocks} blocks, of {self._most:g} that they may"
            raise Broken(LEAK, f"{engine.name}: {what}")

    def match(self, request: SimRequest, local: int) -> Answer:
        """What a turn says of this request now: D has not answered, or there is so much to load."""
        loads = self.taker.loads
        needless = loads["late"] + loads["known"]
        answer: Answer = self.side.match(request, local)
        if loads["late"] + loads["known"] > needless:
            self._engine.world.touch("not_needed", *request.handoffs)
        self._check_waiting(request, sum(self._engine.sides.grouping.needed(request.tokens + 1)))
        return answer

    def _check_waiting(self, request: SimRequest, needed: int) -> None:
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

    def allocated(self, request: SimRequest, tokens: int) -> bool:
        """Whether the blocks that it has got are for a turn."""
        is_turn = bool(self.side.allocated(request, self._engine.sides.tables(request), tokens))
        if is_turn:
            self._engine.world.faults["turns_loaded"] += 1
        return is_turn

    def finished(self, request: SimRequest, *, well: bool) -> None:
        """A request is over; of one that ended well the prompt's blocks are kept, if they may be."""
        engine, tables = self._engine, self._engine.sides.tables(request)
        if not (well and request.keep):
            self.side.finished(request, tables, well=well)
            return
        self._is_there(request, request.tokens, "as kept for the next turn")
        room = self._most - engine.doorway.turn_blocks - sum(map(len, tables))
        self.side.finished(request, tables, well=True)
        handoff, ticket = handoff_of(request.keep), opened(request.keep)
        is_over = ticket is not None and ticket.expires_unix_s <= engine.doorway.config.wall()
        if any(turn.handoff == handoff for turn in self.keeper._kept.values()):
            return
        if room >= 0 and not is_over:
            raise Broken(NEEDLESS, f"{engine.name}: {request.id} is not kept for the next turn, with room for it")
        engine.world.touch("turn_unkept", handoff)

    def found_here(self, request: SimRequest) -> int:
        """Tokens of a prompt that its P has in its prefix cache."""
        engine = self._engine
        return len(engine.prefixes.of(request)[0]) * engine.shape.block_tokens if request.role == "prefill" else 0

    def taken(self, request: SimRequest) -> None:
        self._engine.world.faults["turns_taken"] += 1
        self.has_come(request, request.computed)

    def has_come(self, request: SimRequest, upto: int) -> None:
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
