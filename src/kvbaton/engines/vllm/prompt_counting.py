"""A vLLM engine's account of its prompts, as its scheduler sees them: what a request has when it is first scheduled.

Law: nothing here changes what becomes of a request, and what cannot be read of one costs its own count alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from kvbaton.engines.vllm.guard import guarded, returns
from kvbaton.node.prompt_account import PromptAccount, word_of
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason

log = logging.getLogger(__name__)

NOTHING = "nothing"


def came(account: PromptAccount, request: Any) -> None:
    """A request is in the engine. One for embeddings or scores has no answer that another engine could go on with."""
    pooled = getattr(request, "pooling_params", None) is not None
    word = NOTHING if pooled else word_of(request.kv_transfer_params)
    account.came(request.request_id, request.num_prompt_tokens, word)


@guarded(returns(None))
def begun(account: PromptAccount, scheduled: Any) -> None:
    """A step is about to run: requests that are in it for the first time are computed from here on."""
    for new in scheduled.scheduled_new_reqs:
        account.begun(new.req_id, new.num_computed_tokens)


class FailedLoads:
    """What became of handoffs that failed: on the account, and in the log, of each reason the first few and then ever
    fewer."""

    def __init__(self, account: PromptAccount | None = None) -> None:
        self._account = PromptAccount() if account is None else account
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
            log.warning("[no-kv] kvbaton: no KV for request %s (%s: %s); %s", request_id, end.reason, end.detail, what)
