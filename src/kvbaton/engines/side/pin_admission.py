"""Room to pin at an engine that computes prompts for others: who may begin, who waits, what a refusal looks like.

vLLM has no way for a connector to refuse a request. So one that found no room is shortened to its first token, which
costs a step and no cache, and its answer says that nothing was kept: kvbaton's router asks another P, other routers
pass the word on, and D computes the prompt. An engine that can refuse asks `room` instead of `is_put_off`.

Laws: a prompt is admitted before vLLM gives it blocks, and leased only if it was admitted. A D that waits for a prompt
that is refused is told. A request whose answer is of the prompt itself is computed whole, and leased to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvbaton.engines.side.prefill import PrefillPrompt, PrefillSide
from kvbaton.node.pin_budget import PinBudget, Room
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import RequestId

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
