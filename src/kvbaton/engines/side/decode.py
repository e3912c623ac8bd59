"""D's half of the scheduler side: prompts whose KV comes from elsewhere.

Laws: a request is matched at most once, whatever becomes of it (rule 2.9.8 of vLLM's contract: matching again after a
failure is a livelock). Every load that got blocks is reported exactly once, also after an abort and when something here
fails. Destination blocks are held by a `touch` of our own until nothing can land in them (rule 18). Blocks are taken
before P has answered only for a prompt that P has computed, whose answer is one message away, and for a bounded share
of the cache (decision 0002).

Room for second thoughts: a load that fails must find blocks to be computed with, or it bars every load behind it.
vLLM keeps a failed load at the head of its queue and looks no further while blocks for it are missing. Behind a sliding
window, and where layers keep states, computing a prompt takes more blocks at a time than its loaded end does; if loads
that have arrived hold those blocks, none of them is ever looked at, and the engine stands still. So a load begins only
if there is room for it and for all that the loads before it could come to need (`LoadAdmission`).

Law: with no load under way one is always admitted (vLLM's own admission has the last word); running requests end and
give their blocks back, so what is not admitted now is admitted later, or its claim runs out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvbaton.api.params import Mode, tickets_in
from kvbaton.engines.side.asks import Target
from kvbaton.engines.side.guard import note
from kvbaton.engines.side.protocols import (
    NOT_YET,
    NOTHING,
    NULL_BLOCK_ID,
    Answer,
    Grouping,
    LoadVerdict,
    PinPool,
    SideRequests,
    Tables,
    real,
)
from kvbaton.node.doorway import Doorway, LoadReport, MatchState
from kvbaton.node.prompt_account import PromptAccount
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.content import digest
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Groups
from kvbaton.protocol.geometry.layout import Group, GroupKind, needed_blocks
from kvbaton.protocol.ids import RequestId


class LoadAdmission:
    """What loads under way could come to need beyond what they hold. KV without a window needs nothing more."""

    def __init__(self, grouping: Grouping, pool: PinPool, tokens_per_step: int) -> None:
        self._grouping = grouping
        self._pool = pool
        self._tokens_per_step = tokens_per_step
        self._varies = grouping.slides or grouping.stateful
        self._extra: dict[str, int] = {}

    def admits(self, request: Any) -> bool:
        """Whether one more load may begin now."""
        if not self._varies or not self._extra:
            return True
        return self._pool.free_blocks >= self._need(request.num_tokens) + sum(self._extra.values())

    def allocated(self, request: Any, tables: Tables, *, loads: bool) -> None:
        """A request got blocks: to be loaded, or, after that, to run."""
        if not loads or not self._varies:
            self._extra.pop(request.request_id, None)
            return
        held = sum(1 for number in set(self._grouping.vllm_groups) for each in tables[number] if each != NULL_BLOCK_ID)
        self._extra[request.request_id] = max(0, self._need(request.num_tokens) - held)

    def left(self, request_id: str) -> None:
        self._extra.pop(request_id, None)

    def _need(self, tokens: int) -> int:
        """Blocks that computing so many tokens takes at most at one time."""
        lists = dict(zip(self._grouping.vllm_groups, self._grouping.layout.groups, strict=True))
        return sum(self._need_of(group, tokens) for group in lists.values())

    def _need_of(self, group: Group, tokens: int) -> int:
        if group.kind is GroupKind.STATE:
            return self._grouping.state_blocks
        computed = min(tokens, group.window + self._tokens_per_step) if group.window else tokens
        return needed_blocks(computed, group.block_tokens) + 1


log = logging.getLogger(__name__)

ABORTED = End(Reason.ABORTED)
EARLY_SHARE = 4
"""Of the cache, one part in so many may be taken by loads that began before P's answer."""


class FailedLoads:
    """What became of handoffs that failed: on the account, and in the log, of each reason the first few and then ever
    fewer."""

    def __init__(
        self,
        account: PromptAccount | None = None,
        refused: Counter[str] | None = None,
        client_id: Callable[[str], str] = str,
    ) -> None:
        """`refused`: counts those that never reached the ledger, by reason. `client_id`: of a request's own id."""
        self._account = PromptAccount() if account is None else account
        self.refused: Counter[str] = Counter() if refused is None else refused
        self._client_id = client_id
        self._said: Counter[str] = Counter()

    def say(self, request_id: str, end: End, *, recomputes: bool) -> None:
        if end.delivered:
            return
        self._account.failed(request_id, str(end.reason))
        if end.reason is Reason.ABORTED:
            return
        self._said[str(end.reason)] += 1
        if worth_saying(self._said[str(end.reason)]):
            what = "its prompt is computed here" if recomputes else "it fails"
            log.warning(
                "[no-kv] kvbaton: no KV for request %s (%s: %s); %s", request_id, end.reason, end.detail, what,
                extra={"request": self._client_id(request_id)},
            )  # fmt: skip


@dataclass(slots=True)
class _Load:
    """A load that the engine waits for."""

    first_token: int
    blocks: Groups
    is_early: bool = False  # it began before P's answer
    is_promised: bool = True  # else nobody said that it would succeed, and its failure fails nothing
    is_void: bool = False  # whatever comes of it, it is of no use any more
    is_over: bool = False  # its request has ended


@dataclass(slots=True)
class DecodeSide:
    """All prompts that are taken over here."""

    door: Doorway
    pool: PinPool
    grouping: Grouping
    requests: SideRequests
    recomputes: bool  # else a failed handoff fails its request
    keeps_prefix: bool  # the engine can keep the good blocks of a failed load: only with one group, and that of KV
    room: LoadAdmission | None = None
    blocks_total: int = 0
    has_second_source: bool = False  # which the engine asks before it lets a failed handoff fail its request (`doom`)
    _positions: dict[str, int] = field(default_factory=dict)
    _doomed: dict[str, End] = field(default_factory=dict)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _verdicts: list[LoadVerdict] = field(default_factory=list)
    failed: FailedLoads = field(default_factory=FailedLoads)

    def accepted(self, request: Any, target: Target) -> None:
        """A request came whose prompt KV is promised: claim it now, long before there is room for it."""
        if self.is_accepted(request.request_id):
            return  # when it was read
        position = self.requests.handed_tokens(request)
        if position == 0:
            self.disowned(request, Reason.ABORTED)
            return
        self._positions[request.request_id] = position
        content = digest(self.requests.content(request, position))
        push = target.mode is Mode.PUSH
        name = RequestId(request.request_id)
        self.door.want(name, target.ticket, content, position, push=push, trace=target.trace)

    def is_accepted(self, request_id: str) -> bool:
        return request_id in self._positions

    def refused(self, request: Any, end: End) -> None:
        """A request came with parameters that mean nothing: the policy decides, as after any other failure."""
        self.failed.refused[str(end.reason)] += 1
        self._say(request.request_id, end)
        self.disowned(request, end.reason or Reason.ABORTED)
        if not self.recomputes:
            self._positions[request.request_id] = request.num_prompt_tokens
            self._doomed[request.request_id] = end

    def disowned(self, request: Any, reason: Reason) -> None:
        """Nothing is read by the tickets that came with this request: P need not keep what they promise."""
        for ticket in tickets_in(request.kv_transfer_params):
            self.door.disown(ticket, reason)

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the local ones can be loaded. May be asked often, and the answer discarded."""
        request_id = request.request_id
        position = self._positions.get(request_id)
        if position is None:
            return NOTHING
        missing = position - local_tokens
        found = self.door.match(RequestId(request_id))
        if found.state is MatchState.NOT_YET and missing > 0 and not (found.computed and self._spares(position)):
            return NOT_YET
        if found.state in (MatchState.NOT_YET, MatchState.FOUND) and missing > 0:
            return (missing, True) if self.room is None or self.room.admits(request) else NOT_YET
        if found.state is MatchState.FAILED:
            assert found.end is not None
            self._say(request_id, found.end)
            if not found.asked:
                self.failed.refused[str(found.end.reason)] += 1
            if not self.recomputes:
                self._doomed[request_id] = found.end
        self.door.not_needed(RequestId(request_id))
        return NOTHING if self.has_second_source else self.doom(request_id, missing)

    def doom(self, request_id: str, missing_tokens: int) -> Answer:
        """Nobody else has the prompt of a handoff that failed: its request is failed, by a load that fails."""
        return (missing_tokens, True) if request_id in self._doomed and missing_tokens > 0 else NOTHING

    def lost(self, request_id: str) -> End | None:
        """How its handoff failed, where that fails the request unless there is a second source."""
        return self._doomed.get(request_id)

    def blocked(self, request: Any) -> bool:
        """Whether `match` has to wait, for P or for room. Without side effects."""
        if self.door.waits(RequestId(request.request_id)):
            return True
        known = request.request_id in self._positions and request.request_id not in self._doomed
        return known and self.room is not None and not self.room.admits(request)

    def _spares(self, position: int) -> bool:
        needed = sum(self.grouping.needed(position))
        early = sum(sum(map(len, load.blocks)) for load in self._loads.values() if load.is_early)
        return needed + early <= self.blocks_total // EARLY_SHARE

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        """The engine has blocks for the request; with external tokens it now waits for a report."""
        request_id = request.request_id
        position = self._positions.pop(request_id, None)
        if self.room is not None:
            self.room.allocated(request, tables, loads=external_tokens > 0)
        if external_tokens == 0:
            self._doomed.pop(request_id, None)
            self.door.not_needed(RequestId(request_id))
            return
        doomed = self._doomed.pop(request_id, None)
        if doomed is not None:
            self.fails(request_id, doomed)
            return
        self._loads[request_id] = _Load(0, ())
        if position is None:
            self._conclude(request_id, ABORTED)
            return
        first_token = position - external_tokens
        grouping = self.grouping
        wanted = grouping.cut(tables, grouping.first(first_token), grouping.needed(position), position)
        self.begin_load(request_id, first_token, wanted)

    def begin_load(self, request_id: str, first_token: int, wanted: Groups, *, promised: bool = True) -> None:
        """From here on one report is owed to the engine."""
        early = self.door.waits(RequestId(request_id))
        self._loads[request_id] = _Load(first_token, wanted, early, promised)
        self.pool.touch(real(wanted))  # before anybody knows of them, so that a failure here costs the load alone
        try:
            self.door.allocated(RequestId(request_id), wanted, first_token)
        except Exception:
            if not self.door.holds(RequestId(request_id)):
                self.pool.unpin(real(wanted))
            raise

    def broke(self, request: Any) -> None:
        """Something here failed while a load began that the engine waits for: it has ended as failed. Never raises."""
        request_id = RequestId(request.request_id)
        try:
            self.door.gave_up(request_id)
        except Exception as error:  # noqa: BLE001 - promise 4
            note("gave_up", error)
        if not self.door.holds(request_id):  # else the ledger's report is still to come
            self.fails(request_id)

    def finished(self, request: Any) -> None:
        """The request is over in the engine; a load under way still gets its report."""
        self._positions.pop(request.request_id, None)
        self._doomed.pop(request.request_id, None)
        if (load := self._loads.get(request.request_id)) is not None:
            load.is_over = True
        if self.room is not None:
            self.room.left(request.request_id)
        self.door.gave_up(RequestId(request.request_id))

    def reported(self, duty: LoadReport) -> None:
        """The ledger's word on a load; it comes once for each rank, and is passed on once."""
        if duty.rank == 0:
            self._conclude(duty.request, duty.end)

    def fails(self, request_id: str, end: End = ABORTED) -> None:
        """Whatever the ledger said of this load, it counts as failed: the engine would wait for its report for ever."""
        self._loads.pop(request_id, None)
        nothing = End(end.reason, end.detail)  # what an earlier load brought is not in this one's blocks
        self._verdicts.append(LoadVerdict(request_id, failed=True, end=nothing, final=True))

    def voided(self) -> None:
        """Weights were replaced: no load that the engine was not told of is good, also where its last byte is here."""
        for load in self._loads.values():
            load.is_void = True

    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        verdicts, self._verdicts = self._verdicts, []
        return tuple(verdicts)

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._verdicts)

    def _conclude(self, request_id: str, end: End) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.is_void:
            end = End(Reason.ABORTED, "weights were replaced while it was loaded")
        self._say(request_id, end, promised=load.is_promised)
        bad, final = tuple(self._bad_blocks(load, end)), load.is_promised
        if final and self.has_second_source and not (end.delivered or self.recomputes or load.is_over):
            self._doomed[request_id], final = end, False
        self._verdicts.append(LoadVerdict(request_id, not end.delivered and not bad, bad, end, final))

    def _say(self, request_id: str, end: End, *, promised: bool = True) -> None:
        self.failed.say(request_id, end, recomputes=self.recomputes or not promised)

    def _bad_blocks(self, load: _Load, end: End) -> Iterable[int]:
        """What must be computed again, where the engine can keep the rest, and some of it is good."""
        if end.delivered or not (self.recomputes and self.keeps_prefix) or end.good_tokens <= load.first_token:
            return ()
        size = self.grouping.block_tokens[0]
        return real((load.blocks[0][(end.good_tokens - load.first_token) // size :],))
