"""A circuit breaker for a store that has failed. Time is an argument.

Law: after a failure no call is made until `retry_s` has passed, then one at a time may try; success closes the breaker,
each further failure doubles the wait, up to its bound. So a dead store costs a request nothing, not a timeout.
"""

from __future__ import annotations


class Breaker:
    """Closed (all calls pass), open (none), or trying (one)."""

    def __init__(self, retry_s_min: float, retry_s_max: float) -> None:
        self._bounds = retry_s_min, retry_s_max
        self._wait_s = 0.0
        self._until = 0.0
        self._trying = False

    def may_ask(self, now: float) -> bool:
        """Whether a call may start; if this is the trial, others wait for its result."""
        if not self._wait_s:
            return True
        if self._trying or now < self._until:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self._wait_s, self._trying = 0.0, False

    def failed(self, now: float) -> None:
        if self._wait_s and not self._trying and now < self._until:
            return  # it started before the known failure
        low, high = self._bounds
        self._wait_s = min(high, max(low, self._wait_s * 2))
        self._until = now + self._wait_s
        self._trying = False
