"""What SGLang makes for each request: a sender on P, a receiver on D. Their `poll` is all that SGLang waits by.

Laws: `poll` never blocks and never raises. Before `init`, or `send_metadata`, it says nothing but Bootstrapping,
WaitingForInput and Failed: SGLang ends itself at anything else. Success and Failed are for good, and only they have
SGLang give the pages away; so a receiver that was aborted, or failed, says Failed when no byte can land in them any
more. A request whose tokens SGLang never showed (`bind`) has failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from kvbaton.engines.sglang.handoffs import Handoffs, is_ready, told
from kvbaton.engines.sglang.sglang_requests import AskedPrompt, asked
from kvbaton.engines.side.guard import guarded, note
from kvbaton.node.pin_budget import Room
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import LeaseId

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
"""SGLang's `KVPoll`."""
UNBOUND = "the plug-in's hook was not called for this request: a SGLang that kvbaton does not know"


class HandoffFailed(Exception):
    """What SGLang tells the client of a request."""

    is_from_another_rank = False

    def __init__(self, room: int, why: str) -> None:
        super().__init__(f"kvbaton: no KV for room {room}: {why}")
        self.failure_reason = why


class _Poller:
    """What both have in common."""

    abort_notified = False
    require_staging = False

    def __init__(self, mgr: Any, bootstrap_room: Any) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: int | None = None
        self.why = ""  # it failed, or was aborted
        self._handoffs: Handoffs = mgr.handoffs
        self._asked: AskedPrompt | None = None

    def bind(self, req: Any) -> None:
        """The request that it is for, before anything else is asked of it."""
        try:
            found = asked(req, self.bootstrap_room)
            self._handoffs.came(found)
        except ProtocolError as error:
            self.why = error.detail
        else:
            self._asked = found

    def failure_exception(self) -> NoReturn:
        raise HandoffFailed(self.bootstrap_room, self.why or "aborted")

    def poll_pp_consensus(self) -> int:
        return self.poll()

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        try:
            self._handoffs.do_duties()
            if self._asked is None and not self.why:
                self.why = UNBOUND
            state = self._resting() if self.why or self._asked is None else self._look(self._asked)
        except Exception as error:  # noqa: BLE001 - promise 4: it would be the end of the scheduler
            note(f"{type(self).__name__}.poll", error)
            self.why = self.why or f"a fault of kvbaton: {error}"
            self.abort()
            state = self._resting()
        if state in (FAILED, SUCCESS):
            self.conclude_state = state
            self.clear()
        return state

    @guarded(lambda self: None)
    def abort(self) -> None:
        if self.conclude_state is None:
            self._fail("aborted")

    def clear(self) -> None:
        raise NotImplementedError

    def _look(self, asked: AskedPrompt) -> int:
        """Of a request that was shown, and has not failed."""
        raise NotImplementedError

    def _fail(self, why: str) -> None:
        raise NotImplementedError

    def _resting(self) -> int:
        """FAILED when it may be said, which is when nothing moves any more."""
        raise NotImplementedError


class BatonSender(_Poller):
    """P's end of one handoff."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *_told: Any, **_told_by_name: Any) -> None:
        """SGLang 0.5.17 says more (`dest_tp_ranks`, `pp_rank`) than 0.5.23; with one rank it says nothing."""
        super().__init__(mgr, bootstrap_room)
        self._early_send_wait_event: Any = None  # SGLang's: behind it the pages of the next `send` are written
        self._is_admitted = False
        self._lease: LeaseId | None = None
        self._slot = self._pages_due = 0
        self._sent: deque[tuple[Any, Sequence[int], bytes | None]] = deque()

    def bind(self, req: Any) -> None:
        super().bind(req)
        if self._asked is not None:
            self._handoffs.accepted(self._asked)

    @guarded(lambda self, *_args, **_kwargs: self.abort())
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """D may claim from here on."""
        if self._asked is None or self.why:
            return
        self._pages_due, self._slot = num_kv_indices, aux_index or 0
        self._lease = self._handoffs.begun(self._asked, self._slot)
        if self._lease is None:
            self._fail("P could not begin: its ticket is not one of this cluster, or there is no room")

    @guarded(lambda self, *_args, **_kwargs: self.abort())
    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **_told: Any) -> None:
        """A chunk's pages; SGLang has seen its forward pass end, or says behind which event it will have."""
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if self._asked is None or self._lease is None or self.why or self.conclude_state is not None:
            return
        pages = [int(page) for page in kv_indices]
        self._pages_due -= len(pages)
        row = None
        if self._pages_due <= 0:
            try:
                row = self._handoffs.filled(self._asked, self._slot)
            except ProtocolError as error:
                self._fail(error.detail)
                return
        self._sent.append((event, pages, row))
        self._tell(self._asked)

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def mark_prefill_complete(self) -> None:
        """Of an allocation policy that is refused."""

    def pop_decode_prefix_len(self) -> int:
        """D reads what it lacks, and P lends all."""
        return 0

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def get_transfer_metric(self) -> Any:
        return self.kv_mgr.no_metric()

    @guarded(lambda self: None)
    def clear(self) -> None:
        if self._asked is not None:
            self._handoffs.left_prompt(self._asked)
            self._asked = None

    def _look(self, asked: AskedPrompt) -> int:
        self._tell(asked)
        if not self._is_admitted:
            room = self._handoffs.room_for(asked)
            if room is Room.REFUSED:
                self._fail(f"{Reason.PINS_FULL}: no room to pin the KV of one more prompt; try again later")
                return FAILED
            self._is_admitted = room is Room.ADMITTED
            if not self._is_admitted:
                return BOOTSTRAPPING
        if self._lease is None:
            return WAITING_FOR_INPUT
        if self._handoffs.door.is_leased(self._lease):
            return TRANSFERRING
        reason = self._handoffs.how_ended(self._lease)
        if reason is None and self._pages_due <= 0 and not self._sent:
            return SUCCESS
        self._fail(f"{reason}: no D has committed it")
        return FAILED

    def _tell(self, asked: AskedPrompt) -> None:
        while self._sent and is_ready(self._sent[0][0]):
            _, pages, row = self._sent.popleft()
            self._handoffs.computed(asked, pages, row)

    def _fail(self, why: str) -> None:
        self.why = self.why or why
        self._sent.clear()
        if self._asked is not None:
            self._handoffs.gave_up_prompt(self._asked, Reason.SOURCE_ABORTED)

    def _resting(self) -> int:
        is_over = self._lease is None or not self._handoffs.door.is_leased(self._lease)
        return FAILED if is_over else TRANSFERRING


class BatonReceiver(_Poller):
    """D's end of one handoff."""

    supports_host_destination = False

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None, **_told: Any) -> None:
        super().__init__(mgr, bootstrap_room)
        self._address = bootstrap_addr
        self._slot = -1  # with it, it has pages
        self._is_wanted = False

    @guarded(lambda self, *_args, **_kwargs: self.abort())
    def init(self, prefill_dp_rank: int) -> None:
        if self._asked is None or self.why:
            return
        if prefill_dp_rank:
            self._fail(f"data-parallel rank {prefill_dp_rank} of P: only 0 hands over")
            return
        source = self.kv_mgr.source_at(self._address)
        if source is None:
            self._fail(f"{Reason.PEER_UNKNOWN}: no prefill worker of this cluster has its bootstrap at {self._address}")
            return
        self._handoffs.wanted(self._asked, source)
        self._is_wanted = True

    @guarded(lambda self, *_args, **_kwargs: self.abort())
    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **_told: Any,
    ) -> None:
        """D has pages for the whole prompt: they are read into from here on."""
        if self._asked is None or self.why:
            return
        if decode_prefix_len or aux_index is None:
            self._fail("D's radix cache: a prompt of which D has the beginning cannot be taken over")
            return
        self._slot = aux_index
        self._handoffs.allocated(self._asked, [int(page) for page in kv_indices], aux_index)

    def get_transfer_metric(self) -> Any:
        return self.kv_mgr.no_metric()

    def is_abort_release_safe(self) -> bool:
        return self._asked is None or not self._handoffs.holds(self._asked)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nobody but D writes its pages: there is nobody to tell before they can be used again."""

    @guarded(lambda self: None)
    def clear(self) -> None:
        if self._asked is not None:
            self._handoffs.left(self._asked)
            self._asked = None

    def _look(self, asked: AskedPrompt) -> int:
        if not self._is_wanted:
            return BOOTSTRAPPING
        if self._slot < 0:
            found = self._handoffs.found(asked)
            if isinstance(found, bool):
                return WAITING_FOR_INPUT if found else BOOTSTRAPPING
            self._fail(told(found))
            return FAILED
        verdict = self._handoffs.verdict(asked)
        if verdict is None:
            return TRANSFERRING
        if not verdict.is_good:
            self._fail(told(verdict.end))
            return self._resting()
        try:
            self._handoffs.fill(asked, self._slot)
        except ProtocolError as error:
            self._fail(error.detail)
            return self._resting()
        return SUCCESS

    def _fail(self, why: str) -> None:
        self.why = self.why or why
        if self._asked is not None:
            self._handoffs.gave_up(self._asked)

    def _resting(self) -> int:
        return TRANSFERRING if self._asked is not None and self._handoffs.holds(self._asked) else FAILED
