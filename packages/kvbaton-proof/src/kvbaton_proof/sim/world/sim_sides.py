"""What stands between a simulated engine and the production sides: how its requests are read, how its blocks are held,
and who says which layers are done.

Laws: a chunk is announced with its step's output, which the sides see to, a layer by the event behind that layer on
that rank (rule 30). Who waits for room to pin is admitted or refused in time, as is held against the world's clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from kvbaton.engines.side.decode import DecodeSide, LoadAdmission
from kvbaton.engines.side.prefill import PinAdmission, PrefillSide
from kvbaton.engines.side.protocols import NOT_YET, Answer, EndedTurn, Grouping, Leaving, LoadVerdict, Tables, real
from kvbaton.node.doorway import LoadReport
from kvbaton.protocol.content import Content
from kvbaton.protocol.geometry.progress import GroupProgress, Progress
from kvbaton.protocol.ids import LeaseId
from kvbaton_proof.sim.promises import DEATH, HANG, WRONG, Broken
from kvbaton_proof.sim.world.sim_device import Device, Step
from kvbaton_proof.sim.world.sim_doorway import WatchedDoorway
from kvbaton_proof.sim.world.sim_memory import Shape, word_at
from kvbaton_proof.sim.world.sim_pool import Pool
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest
from kvbaton_proof.sim.world.world import World

CHUNKS = (2, 4, 8, 16)
"""Tokens of one prompt that a step computes."""
LATE_LOOK_S = 0.01
LATE_EVENT, LATE_EVENT_S = 0.3, 0.02
"""Some events are noticed late: after the step's output, or after the request's end."""


class SimRequests:
    """What the sides ask of a request: `SideRequests`."""

    def handed_tokens(self, request: SimRequest) -> int:
        return request.tokens

    def content(self, request: SimRequest, position: int) -> Content:
        return Content((word_at(request.content, position - 1), position), position)

    def ended_turn(self, request: SimRequest) -> EndedTurn | None:
        return EndedTurn(request.keep, request.tokens) if request.keep else None

    def turn_content(self, request: SimRequest, upto: int) -> Content | None:
        return self.content(request, upto)

    def tokens(self, request: SimRequest, first: int, last: int) -> Sequence[int]:
        return self.content(request, last).tokens[first:last]

    def wants_whole_prompt(self, request: SimRequest) -> bool:
        return False

    def shorten(self, request: SimRequest, tokens: int, *, drafts: bool = False) -> None:
        request.tokens = tokens

    def arrived_at(self, request: SimRequest) -> float | None:
        return None


class SidePool:
    """The pool as P's half has it: `PinPool`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def free_blocks(self) -> int:
        return len(self._pool.free)

    def touch(self, ids: Iterable[int]) -> None:
        blocks = tuple(ids)
        self._pool.before_pin(blocks)
        self._pool.touch(blocks)

    def unpin(self, ids: Sequence[int]) -> None:
        self._pool.unpin(ids)

    def overwritten(self, ids: Iterable[int]) -> None:
        self._pool.overwritten(ids)


class LandingPool(SidePool):
    """As D's half has it: bytes may land in what it touches, ordered with no step."""

    def __init__(self, pool: Pool, device: Device) -> None:
        super().__init__(pool)
        self._device = device

    def touch(self, ids: Iterable[int]) -> None:
        blocks = tuple(ids)
        self._device.check_quiet(blocks)
        self._pool.hold(blocks)

    def unpin(self, ids: Sequence[int]) -> None:
        self._pool.let_go(tuple(ids))


def note_report(name: str, request: SimRequest | None, duty: LoadReport) -> None:
    """Every rank reports a load that is waited for, once."""
    if request is None or request.phase is not Phase.LOADING:
        raise Broken(DEATH, f"{name}: a report for {duty.request}, which is not loading")
    if duty.rank in request.reported:
        raise Broken(DEATH, f"{name}: rank {duty.rank} reported {duty.request} twice")
    request.reported.add(duty.rank)
    if not duty.end.delivered:
        request.failed = duty.end


def judged(name: str, request: SimRequest | None, verdict: LoadVerdict, ranks: int) -> SimRequest:
    """A load has one verdict, when all ranks have reported, and what they said."""
    if request is None or request.phase is not Phase.LOADING:
        raise Broken(DEATH, f"{name}: a verdict on {verdict.request_id}, which is not loading")
    if len(request.reported) not in (0, ranks):  # 0: its claim had failed before it got blocks
        raise Broken(DEATH, f"{name}: a verdict on {request.id}, of which {request.reported} have reported")
    if verdict.is_good is not (bool(request.reported) and request.failed is None):
        raise Broken(WRONG, f"{name}: {verdict}, and its ranks said {request.failed}")
    return request


class Sides:
    """Both halves of one engine in one life."""

    def __init__(self, world: World, shape: Shape, doorway: WatchedDoorway, pool: Pool, device: Device) -> None:
        self.world = world
        self.shape = shape
        self.doorway = doorway
        self.grouping = Grouping(shape.layout(), tuple(range(len(shape.group_layers))), state_blocks=1)
        self.landing = LandingPool(pool, device)
        self.pins = SidePool(pool)
        self.prefill = PrefillSide(doorway, self.pins, self.grouping, SimRequests())
        self.admission = PinAdmission(self.prefill, doorway.budget, lambda: world.now, self._refused)
        self.on_refused: Callable[[SimRequest], None] = lambda request: None
        self.lists_early = False  # that a prompt is all listed is said with its last chunk's issue, not with its output

    def decode(self, *, recomputes: bool) -> DecodeSide:
        room = LoadAdmission(self.grouping, self.landing, max(CHUNKS)) if recomputes else None
        alone = self.grouping.count == 1 and not self.grouping.stateful
        return DecodeSide(self.doorway, self.landing, self.grouping, SimRequests(), recomputes, alone, room)

    def matched(self, request: SimRequest, answer: Answer) -> Answer:
        """A load that was granted and may not begin waits for room: other loads have the cache."""
        if answer == NOT_YET and not self.doorway.waits(request.id):
            self.world.touch("no_room", *request.handoffs)
        return answer

    def tables(self, request: SimRequest) -> Tables:
        """Its blocks as the sides read them."""
        needed = -(-request.tokens // self.shape.block_tokens)
        blocks = request.blocks or ([],) * self.grouping.count
        return [self.shape.table(group, ids[:needed], request.tokens) for group, ids in enumerate(blocks)]

    def scheduled(self, step: int, request: SimRequest, tokens: int) -> Leaving | None:
        """A chunk of a prompt, or a step behind it, is about to be issued."""
        leaving = self.prefill.scheduled(step, request.id, tokens, self.tables(request))
        prompt = self.prefill.prompts.get(request.id)
        if prompt is not None and prompt.lease is not None:
            self.doorway.streams(prompt.lease)
            if self.lists_early and request.num_computed_tokens + tokens == request.tokens:
                self.doorway.list_early(prompt.lease)
        return leaving

    def goes_on(self, request: SimRequest) -> bool:
        """Whether states of it that another step would write to are leased."""
        prompt = self.prefill.prompts.get(request.id)
        return prompt is not None and bool(prompt.states)

    @property
    def kept_blocks(self) -> int:
        """That are held for prompts under way, until a lease has them."""
        return sum(len(real(prompt.kept)) for prompt in self.prefill.prompts.values())

    # --- room to pin

    def is_put_off(self, request: SimRequest, wake: Callable[[], None]) -> bool:
        """Whether a prompt that is computed for others has no room to be pinned yet, or was refused just now."""
        world, budget = self.world, self.doorway.budget
        waited = self.admission.blocked(request)
        if not self.admission.is_put_off(request):
            return False
        if request.id in self.prefill.refused:
            wake()  # it is shorter, and looked at anew
            return True
        world.touch("no_room", *request.handoffs)
        request.put_off_at = world.now if request.put_off_at is None else request.put_off_at
        if world.now > request.put_off_at + budget.wait_s + LATE_LOOK_S:
            raise Broken(HANG, f"{request.id} waits for room to pin past its deadline")
        if not waited:
            world.faults["pins_waited"] += 1
            world.after(budget.wait_s + LATE_LOOK_S, wake)
        return True

    def _refused(self, request: SimRequest) -> None:
        self.world.strike("pins_refused", *request.handoffs)
        self.on_refused(request)


class Announcer:
    """Layers of chunks, as they are done."""

    def __init__(self, world: World, shape: Shape, doorway: WatchedDoorway) -> None:
        self.world = world
        self.shape = shape
        self.doorway = doorway
        self.layerwise = False

    def layer_done(self, step: Step, rank: int, layer: int) -> None:
        """The event behind a layer has come to pass on one rank; whoever waits for events says so, sooner or later."""
        if not self.layerwise:
            return
        for work in step.works:
            if work.leaving is not None and self.world.chance(0.5):
                late_s = self.world.rng.uniform(0, LATE_EVENT_S) if self.world.chance(LATE_EVENT) else 0.0
                by_rank = self.doorway.by_rank  # who speaks twice, in order
                self._announce_layer(work.leaving, rank, layer, 0.0 if by_rank else late_s)

    def _announce_layer(self, leaving: Leaving, rank: int, layer: int, late_s: float) -> None:
        own = self.shape.own_layers[rank]
        done = self.shape.layers if layer == own[-1] else layer + 1  # a rank counts other stages' layers as ready
        say = functools.partial(self.doorway.announce, LeaseId(leaving.lease), self._ahead(leaving, done), rank)
        if late_s:
            self.world.after(late_s, say)
        else:
            say()

    def _ahead(self, leaving: Leaving, layers: int) -> Progress:
        """What is ready when `layers` layers (through all groups) of the chunk are done."""
        found = []
        for group, count in enumerate(self.shape.group_layers):
            if group in self.shape.states:
                found.append(GroupProgress())  # ready with its step, not before
                continue
            done = max(0, min(count, layers - self.shape.first_layer(group)))
            had, has = leaving.had[group], leaving.has[group]
            found.append(GroupProgress(has) if done == count else GroupProgress(had, has, done))
        return tuple(found)
