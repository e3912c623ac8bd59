"""When D refuses a request for the KV that P handed over: a failed handoff, and no mistake of the client's.

Law: what a client could not have sent is never held against it.
"""

from __future__ import annotations

from kvbaton.api.api_errors import ApiError
from kvbaton.api.params import FIELD, Mode
from kvbaton.router.flow.attempt import ChosenRoute
from kvbaton.router.flow.worker_calls import LegError


def is_of_the_handoff(route: ChosenRoute, error: LegError) -> bool:
    """Whether D refuses what P answered: clients cannot send that field, nor is a prompt too large that P took."""
    if (error.fault.param or "").startswith(FIELD):
        return True
    return (
        error.side == "decode" and error.fault.status == 413 and route.prefill is not None and route.mode is Mode.PULL
    )


def not_the_clients(error: LegError) -> LegError:
    what = f"{error.side} worker {error.worker.name} refuses the handed-over KV: {error.fault.message}"
    said = f"{error.fault.recorded}, for the handed-over KV"
    fault = ApiError(502, what, type="handoff_failed", code=error.fault.code, recorded=said)
    return LegError(error.side, error.worker, fault)
