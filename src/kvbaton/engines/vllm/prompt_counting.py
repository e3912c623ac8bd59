"""A vLLM engine's account of its prompts, as its scheduler sees them: what a request has when it is first scheduled.

Law: nothing here changes what becomes of a request, and what cannot be read of one costs its own count alone.
"""

from __future__ import annotations

from typing import Any

from kvbaton.engines.side.guard import guarded, returns
from kvbaton.node.prompt_account import PromptAccount, word_of

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
