"""What the router tells a D that answers alone, so that its account can tell what was planned from what a P owed.

And what a P tells the router that keeps nothing of a prompt, for want of room.

Law: pure; words are of the closed list `alone_reasons`, and only workers of this cluster are told.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.api.api_errors import RETRY_AFTER_S, ApiError
from kvbaton.api.params import FIELD as PARAMS
from kvbaton.observe.codes.reasons import FALLBACK, FIELD, WORDS
from kvbaton.protocol.errors import Reason
from kvbaton.router.flow import kv_params
from kvbaton.router.flow.worker_leg import Leg, LegError, WorkerAnswer
from kvbaton.router.policy import NEVER
from kvbaton.router.workers.directory import ListedEngine, WorkerListState


def word_for(alone: str, last: LegError | None, workers: Sequence[ListedEngine]) -> str:
    """Why D computes the prompt: as planned, or what was wrong with the prefill workers."""
    if alone != FALLBACK:
        return alone
    if last is not None and last.is_handoff:
        return "handoff_failed"
    if last is not None and last.side == "prefill":
        return "prefill_full" if last.busy else "prefill_failed"
    prefills = [worker for worker in workers if worker.prefills]
    if not prefills:
        return "no_prefill"
    if all(worker.state is WorkerListState.DRAINING for worker in prefills):
        return "prefill_draining"
    return "prefill_broken" if all(worker.state in NEVER for worker in prefills) else "no_pair"


def word_params(word: str, worker: ListedEngine) -> bytes | None:
    """The parameters that carry the word; None for workers of other systems, and for words that D does not know."""
    return msgspec.json.encode({FIELD: word}) if worker.is_own and word in WORDS else None


def check_kept(leg: Leg, answer: bytes) -> None:
    """`LegError` where P answers that it keeps nothing, for want of room: it is full, and another may not be."""
    try:
        found = kv_params.handover(answer)
    except (ValueError, RecursionError):
        return  # somebody else's to judge
    if found is not None and found[1].refused == Reason.PINS_FULL:
        said = f"prefill worker {leg.worker.name} has no room to keep the prompt's KV for a handoff; try again later"
        fault = ApiError(429, said, type="overloaded_error", code=str(Reason.PINS_FULL), retry_after_s=RETRY_AFTER_S)
        raise LegError(leg.side, leg.worker, fault, busy=True)


def handed(leg: Leg, answer: WorkerAnswer, needs_answer: bool) -> tuple[bytes | None, str | None]:
    """What P hands to D, and the ticket within, if it is one of ours."""
    try:
        found = kv_params.handover(answer.data)
    except kv_params.ParamsError as error:
        raise leg.failed(502, f"answered {PARAMS} {error}", "bad_answer") from None
    except (ValueError, RecursionError):
        raise leg.failed(502, "answered something that is not a JSON object", "bad_answer") from None
    if found is not None and found[1].do_remote_prefill:
        return found[0], found[1].ticket
    if needs_answer:
        raise leg.failed(502, f"answered without {PARAMS} that D could use", "bad_answer")
    return None, None
