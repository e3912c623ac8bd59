"""One request to one P, in a task of its own: Ray's reservation of a replica must be given back after P has answered,
whatever has become of the client's request meanwhile.

Laws: `taken` and `answer` are decided once each. The task ends when P has answered or died, or the leg was given up:
then P is told to stop, so that it neither computes nor keeps what is of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

Prepare = Callable[[str, dict[str, Any]], Any]
"""P's request, given the replica that was chosen and what it published; None: not this one."""


class NotAskedError(Exception):
    """The replica that Ray chose is left alone for now."""


class PrefillLeg:
    """`method`: of Ray's handle of the prefill deployment, bound to what is asked of it."""

    def __init__(self, method: Any, request: Any, raw_request_info: Any, prepare: Prepare) -> None:
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[str] = loop.create_future()  # the replica
        self.answer: asyncio.Future[Any] = loop.create_future()  # the first that P said, None if it said nothing
        self._response: Any = None
        self._task = loop.create_task(self._run(method, request, raw_request_info, prepare))

    async def _run(self, method: Any, request: Any, raw_request_info: Any, prepare: Prepare) -> None:
        try:
            async with method.choose_replica(request) as selection:
                asked = prepare(selection.replica_id, dict(selection.replica_metadata or {}))
                if asked is None:
                    raise NotAskedError(selection.replica_id)
                self._response = method.dispatch(selection, asked, raw_request_info)
                _decide(self.taken, selection.replica_id)
                async for chunk in self._response:
                    _decide(self.answer, chunk)
            _decide(self.answer, None)
        except asyncio.CancelledError:
            self.taken.cancel()
            self.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - Ray's, P's: whoever waits judges it
            for future in (self.taken, self.answer):
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # somebody may have stopped waiting: no complaint at its end

    def give_up(self) -> None:
        """Nobody waits any more."""
        if self._response is None:
            self._task.cancel()
        elif not self.answer.done():
            with contextlib.suppress(Exception):
                self._response.cancel()


def _decide(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
