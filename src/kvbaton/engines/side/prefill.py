"""P's half of the scheduler side: leases for prompts that are computed here, and room to pin them.

Laws: a chunk's blocks are pinned when it is scheduled and announced when every rank has computed it (rules 10, 11).
What a window will have dropped by the end of the prompt is pinned with its last chunk, and so is a state. A prompt is
leased once, also when it is preempted and computed again. Nothing here outlives `finished` but the lease itself. Where
layers keep states, vLLM computes all but the last token of the prompt and ends; if it goes on all the same, what was
granted is stale before the step that overwrites it runs (decision 0019).

Who may begin, who waits, what a refusal looks like: vLLM has no way for a connector to refuse a request. So one that
found no room is shortened to its first token, which costs a step and no cache, and its answer says that nothing was
kept: kvbaton's router asks another P, other routers pass the word on, and D computes the prompt. An engine that can
refuse asks `PinAdmission.room` instead of `is_put_off`.

Laws: a prompt is admitted before vLLM gives it blocks, and leased only if it was admitted. A D that waits for a prompt
that is refused is told. A request whose answer is of the prompt itself is computed whole, and leased to nobody.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from kvbaton.api.params import NOTHING_FOR_D, REFUSED_FOR_D, Mode, target_params
from kvbaton.engines.side.asks import ParamsSource
from kvbaton.engines.side.protocols import Grouping, Leaving, PinPool, SideRequests, Tables, real
from kvbaton.node.doorway import Doorway
from kvbaton.node.pin_budget import STRANGER, Holder, PinBudget, Room
from kvbaton.protocol.content import digest
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import Groups
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import LeaseId, RequestId


@dataclass(slots=True)
class PrefillPrompt:
    """A request whose KV somebody will read, while it is computed."""

    request: Any
    source: ParamsSource
    position: int
    digest: bytes
    lease: LeaseId | None = None  # streaming and push: from its first chunk on
    pinned: tuple[int, ...] = ()  # blocks of each group in the lease
    kept: Groups = ()  # pull, behind windows: touched with the last chunk, until the lease has them
    states: tuple[int, ...] = ()  # blocks that a lease has, and that another step of this request would write to
    spoilt: bool = False  # its lease is over: computed again after preemption, or refused
    holder: Holder = STRANGER  # whose share of the room to pin it takes


@dataclass(slots=True)
class _Announcement:
    step: int
    request_id: str
    counts: tuple[int, ...]
    final: bool


@dataclass(slots=True)
class PrefillSide:
    """All prompts that are computed here for others."""

    door: Doorway
    pool: PinPool
    grouping: Grouping
    requests: SideRequests
    prompts: dict[str, PrefillPrompt] = field(default_factory=dict)
    _announced: deque[_Announcement] = field(default_factory=deque)
    _declined: set[str] = field(default_factory=set)  # D is to compute these itself, and waits for a word
    refused: set[str] = field(default_factory=set)  # for want of room to pin: likewise

    def accepted(self, request: Any, source: ParamsSource) -> None:
        """A request came whose KV is wanted elsewhere. Where layers keep states, it is shortened."""
        stateful, requests = self.grouping.stateful, self.requests
        position = requests.handed_tokens(request)
        if position == 0 or (stateful and requests.wants_whole_prompt(request)):
            if source.mode is Mode.PULL:
                self._declined.add(request.request_id)
            return
        content = digest(requests.content(request, position))
        if stateful:
            requests.shorten(request, position, drafts=self.grouping.lookahead > 0)
        self.door.times.accepted(RequestId(request.request_id), requests.arrived_at(request))
        holder = self.door.holder_of(source.ticket)
        self.prompts[request.request_id] = PrefillPrompt(request, source, position, content, holder=holder)

    def shortens(self, request_id: str) -> bool:
        """Whether the request was shortened when it was accepted."""
        return self.grouping.stateful and request_id in self.prompts

    def begun(self, request: Any) -> None:
        """A request got its first blocks: whoever reads behind it may claim from now on."""
        self.door.times.scheduled(RequestId(request.request_id))
        prompt = self.prompts.get(request.request_id)
        if prompt is None or prompt.source.mode is Mode.PULL or prompt.lease is not None or prompt.spoilt:
            return
        if not self.door.budget.holds(RequestId(request.request_id)):
            prompt.spoilt = True  # nobody has asked whether there is room
            return
        try:
            ticket = self.door.open_ticket(prompt.source.ticket or "")
        except ProtocolError:
            prompt.spoilt = True  # D's copy of the ticket fails as well, and it computes the prompt itself
            return
        prompt.lease = self.door.begin(
            ticket.handoff,
            prompt.digest,
            prompt.position,
            target=ticket.target,
            max_readers=ticket.max_readers,
            request=RequestId(request.request_id),
            trace=prompt.source.trace,
        )
        prompt.pinned = (0,) * self.grouping.count

    def scheduled(self, step: int, request_id: str, tokens: int, tables: Tables) -> Leaving | None:
        """A chunk is about to be computed. Returns what the workers may announce layer by layer."""
        prompt = self.prompts.get(request_id)
        if prompt is None:
            return None
        before = prompt.request.num_computed_tokens
        after = before + tokens
        if prompt.states and after > prompt.position:
            self.pool.overwritten(prompt.states)
            prompt.states = ()
        if prompt.spoilt:
            return None
        final = after >= prompt.position
        if prompt.lease is None:
            if final and self.grouping.slides:
                self._keep(prompt, tables)
            return None
        if prompt.pinned == self.grouping.needed(prompt.position):
            return None
        had, has = prompt.pinned, self._pin(prompt, after, final, tables)
        self._announced.append(_Announcement(step, request_id, has, final))
        return Leaving(prompt.lease, had, has) if has != had else None

    def computed(self, step: int) -> None:
        """Every rank is done with this step, and so with those before it."""
        while self._announced and self._announced[0].step <= step:
            told = self._announced.popleft()
            prompt = self.prompts.get(told.request_id)
            if prompt is None or prompt.lease is None or prompt.spoilt:
                continue
            self.door.progressed(prompt.lease, whole(told.counts))
            if told.final:
                self._complete(prompt)

    def preempted(self, request_id: str) -> None:
        prompt = self.prompts.get(request_id)
        if prompt is not None:
            self._spoil(prompt, Reason.SOURCE_PREEMPTED)

    def voided(self, of: Container[str] | None = None) -> None:
        """Nothing of what is being computed (`of` these requests) may be handed over: weights were replaced. D computes
        it."""
        for request_id, prompt in list(self.prompts.items()):
            if of is not None and request_id not in of:
                continue
            if prompt.lease is None and not prompt.spoilt:
                self.tell_reader(prompt, Reason.SOURCE_ABORTED)
            self._spoil(prompt, Reason.SOURCE_ABORTED)
            prompt.spoilt = True
            if prompt.source.mode is Mode.PULL:
                del self.prompts[request_id]
                self._declined.add(request_id)

    def tell_reader(self, prompt: PrefillPrompt, reason: Reason) -> None:
        """A D that was asked at once waits for a lease that will not begin: one that is over says why."""
        if prompt.source.mode is Mode.PULL:
            return
        try:
            ticket = self.door.open_ticket(prompt.source.ticket or "")
        except ProtocolError:
            return  # D's copy of the ticket fails as well
        lease = self.door.begin(ticket.handoff, prompt.digest, prompt.position, target=ticket.target)
        self.door.source_ended(lease, reason)

    def finished(self, request: Any, tables: Tables, *, well: bool) -> dict[str, Any] | None:
        """A request is over. Returns what D needs to know, where it ended well."""
        prompt = self.prompts.pop(request.request_id, None)
        if prompt is None:
            self.door.times.left(RequestId(request.request_id))
            declined = request.request_id in self._declined
            self._declined.discard(request.request_id)
            if request.request_id in self.refused:
                self.refused.discard(request.request_id)
                return dict(REFUSED_FOR_D) if well else None
            return dict(NOTHING_FOR_D) if declined and well else None
        whole_prompt = well and request.num_computed_tokens >= prompt.position
        if not self.door.budget.holds(RequestId(request.request_id)):
            whole_prompt = False  # the engine did not ask about it: nothing was promised
        if self.grouping.stateful and request.num_computed_tokens > prompt.position:
            whole_prompt = False  # its states have counted more tokens than are handed over
        try:
            if prompt.source.mode is Mode.PULL:
                return self._granted(prompt, tables) if whole_prompt else None
            if whole_prompt and prompt.lease is not None and not prompt.spoilt:
                self._end_of(prompt, tables)
                return target_params(prompt.source.mode, prompt.source.ticket)
            return target_params(prompt.source.mode, prompt.source.ticket) if whole_prompt and prompt.spoilt else None
        finally:
            self.door.times.left(RequestId(request.request_id))
            self._spoil(prompt, Reason.SOURCE_ABORTED)

    # --- helpers

    def _pin(self, prompt: PrefillPrompt, after: int, final: bool, tables: Tables) -> tuple[int, ...]:
        """Pin what the chunk adds; a window's blocks all go with the last chunk, when it is known which are needed."""
        assert prompt.lease is not None
        grouping = self.grouping
        upto = grouping.needed(prompt.position) if final else grouping.whole(after)
        if upto != prompt.pinned:
            blocks = grouping.cut(tables, prompt.pinned, upto, prompt.position)
            self._touch_and_pin(prompt.lease, blocks)
            prompt.pinned, prompt.states = upto, grouping.of_states(blocks)
        return upto

    def _touch_and_pin(self, lease: LeaseId, blocks: Groups) -> None:
        """Touched before anybody knows of them; a lease that is over takes none."""
        ids = real(blocks)
        self.pool.touch(ids)
        try:
            taken = self.door.pin(lease, blocks)
        except Exception:
            self.pool.unpin(ids)
            raise
        if not taken:
            self.pool.unpin(ids)

    def _keep(self, prompt: PrefillPrompt, tables: Tables) -> None:
        """Hold the blocks that the last token still needs and that the engine drops before the request is over."""
        if prompt.kept:
            return
        kept = self._all_of(prompt, tables)
        self.pool.touch(real(kept))
        prompt.kept = kept

    def _all_of(self, prompt: PrefillPrompt, tables: Tables) -> Groups:
        position = prompt.position
        return self.grouping.cut(tables, (0,) * self.grouping.count, self.grouping.needed(position), position)

    def _granted(self, prompt: PrefillPrompt, tables: Tables) -> dict[str, Any]:
        blocks = prompt.kept or self._all_of(prompt, tables)
        self.pool.touch(real(blocks))
        try:
            name, trace = RequestId(prompt.request.request_id), prompt.source.trace
            ticket, _ = self.door.grant(prompt.digest, prompt.position, blocks, request=name, trace=trace)
        except Exception:
            self.pool.unpin(real(blocks))
            raise
        return {**target_params(Mode.PULL, ticket), "remote_engine_id": str(self.door.config.me.worker)}

    def _end_of(self, prompt: PrefillPrompt, tables: Tables) -> None:
        """The last chunk was computed with this step, whose announcement has not come yet."""
        assert prompt.lease is not None
        counts = self._pin(prompt, prompt.position, True, tables)
        self.door.progressed(prompt.lease, whole(counts))
        self._complete(prompt)

    def _complete(self, prompt: PrefillPrompt) -> None:
        if prompt.lease is not None:
            self.door.completed(prompt.lease)
        prompt.lease, prompt.spoilt = None, True  # nothing more can be added to it, and it is leased no second time

    def _spoil(self, prompt: PrefillPrompt, reason: Reason) -> None:
        """The prompt's blocks are about to go: end what is being read behind it."""
        if prompt.lease is not None:
            self.door.source_ended(prompt.lease, reason)
            prompt.lease, prompt.spoilt = None, True
        if prompt.kept:
            kept, prompt.kept = prompt.kept, ()
            self.pool.unpin(real(kept))


SHORTENED_TOKENS = 1


class PinAdmission:
    """Of one engine in its prefill role."""

    def __init__(
        self,
        prefill: PrefillSide,
        budget: PinBudget,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[Any], None] = lambda request: None,
    ) -> None:
        self._prefill = prefill
        self._budget = budget
        self._clock = clock
        self._on_refused = on_refused

    def room(self, request: Any) -> Room:
        """Whether the request may begin. One that is refused is leased to nobody, and whoever waits for it is told."""
        prompt = self._prefill.prompts.get(request.request_id)
        if prompt is None:
            return Room.ADMITTED
        name = RequestId(request.request_id)
        room = self._budget.ask(name, self._blocks(prompt), self._clock(), prompt.holder)
        if room is Room.REFUSED:
            del self._prefill.prompts[request.request_id]
            self._prefill.refused.add(request.request_id)
            self._on_refused(request)
            self._prefill.tell_reader(prompt, Reason.PINS_FULL)
        return room

    def is_put_off(self, request: Any) -> bool:
        """Whether the request is to be asked about again: it waits for room, or was shortened just now."""
        room = self.room(request)
        return room is Room.WAITING or (room is Room.REFUSED and self._shorten(request))

    def blocked(self, request: Any) -> bool:
        """Whether `is_put_off` would still make it wait. Without side effects."""
        return self._budget.waits(RequestId(request.request_id), self._clock())

    def left(self, request: Any) -> None:
        """The request is over, and its lease, if there is one, stands for itself."""
        self._budget.left(RequestId(request.request_id))

    def _blocks(self, prompt: PrefillPrompt) -> int:
        return sum(self._prefill.grouping.needed(prompt.position))

    def _shorten(self, request: Any) -> bool:
        """Returns whether vLLM has to look at it anew: it is shorter than vLLM thinks."""
        requests = self._prefill.requests
        if requests.wants_whole_prompt(request) or request.num_prompt_tokens <= SHORTENED_TOKENS:
            return False
        requests.shorten(request, SHORTENED_TOKENS)
        return True
