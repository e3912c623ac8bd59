"""An operator's line to the registry: one question, one answer. Used by one thread, which may wait for it.

Law: an answer is believed only from the registry's key, and only about the worker that was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from kvbaton.control.addressing import ControlError, ControlLimits, check_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.privileges import Act, may

REPEAT_S = 1.0  # a question may be lost, and asking twice is asking once
LIMITS = ControlLimits(frames_queued_max=16)


class OperatorLine:
    """Asks a registry to drain workers. `registry` is its name in the key directory and its endpoint."""

    def __init__(
        self, keyring: Keyring, registry: tuple[WorkerId, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry[0]
        self._clock = clock
        if not may(keyring.role_of(keyring.name), Act.DRAIN):
            raise ControlError(f"name: {keyring.name} is no operator; use one named {m.OPERATOR} or {m.OPERATOR}-…")
        try:
            address = check_endpoint(registry[1], names=True)
        except ValueError as error:
            raise ControlError(f"registry: {error}") from None
        if registry[0] not in keyring.peers:
            raise ControlError(f"{registry[0]}: not in the key directory; give the registry's name there")
        self._control = ZmqControl(keyring, None, LIMITS, clock)
        self._control.set_directory({self._registry: (address, "")})  # under whichever key it has

    def __enter__(self) -> OperatorLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._control.close()

    def drain(self, worker: WorkerId, incarnation: int, timeout_s: float) -> m.DrainState | None:
        """Have a worker drained, and hear how far it is; None when no answer came in time.

        `incarnation` is 0 at first, then the answer's, so that a worker which was started again is left alone.
        """
        until = self._clock() + timeout_s
        asked_at = -REPEAT_S
        while (now := self._clock()) < until:
            if now >= asked_at + REPEAT_S:
                asked_at = now
                self._control.send(self._registry, m.encode(m.DrainWorker(worker, incarnation)))
            for _, frame in self._control.receive():
                said = self._answer(frame)
                if said is not None and said.worker == worker and incarnation in (0, said.incarnation):
                    return said
            self._control.wait(max(0.0, min(until, asked_at + REPEAT_S) - now))
        return None

    def _answer(self, frame: bytes) -> m.DrainState | None:
        try:
            said = m.decode_to_operator(frame)
        except m.RegistryFault:
            return None
        if isinstance(said, m.RegistryRefused):
            raise ControlError(f"the registry refused: {said.detail}")
        return said
