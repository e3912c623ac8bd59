"""How an exchange with a worker can fail: each class says how far it got, and so who may be asked or blamed next."""

from __future__ import annotations


class WireError(Exception):
    """An exchange that did not come to its end."""


class UnreachableError(WireError):
    """There is no connection: nothing was sent."""


class StaleError(WireError):
    """A connection that had been idle was closed by the worker as the request went out: no fault of anybody."""


class BrokenError(WireError):
    """The worker closed the connection in the middle of an exchange."""


class LateError(WireError):
    """The time that was given to the exchange has passed."""


class GarbageError(WireError):
    """What came is not HTTP, or more of it than is allowed."""


class NoRoomError(WireError):
    """The router has no memory or no descriptor left for it: no fault of the worker's, unless its answer is huge."""

    def __init__(self, message: str, answered_bytes: int = 0) -> None:
        super().__init__(message)
        self.answered_bytes = answered_bytes
