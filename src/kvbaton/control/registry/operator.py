"""An operator's lines to the registries of a cluster: one question to all, one answer. Used by one thread, which waits.

Laws: an answer is believed only from a registry's key, and only about the worker that was asked for. A worker is gone
when no registry that answers lists it, and idle when none of them has it at work. One that does not answer is waited
for once; from then on the others suffice until it does. A registry is asked which life is listed, and the order is
signed for that life: no registry can keep it for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from kvbaton.control.addressing import ControlError, ControlLimits, RegistryPlace, check_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.statements import drain_order
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.legality import Act, may

REPEAT_S = 1.0  # a question may be lost, and asking twice is asking once
SILENT_S = 0.3  # for which one that did not answer the last question is waited for
SLICE_S = 0.02
LIMITS = ControlLimits(frames_queued_max=16)
NO_LIFE = Incarnation((1 << 63) - 1)
"""Named in a look, and signed like an order: a registry of the release before, which knows no look, orders nothing."""
_STATES = ("ready", "draining", "idle", "gone", "unknown")
"""Of several answers the first of these counts: a worker is there as long as one registry says so. Of looks that say
the same, the one that knows most."""


class OperatorLine:
    """Asks registries to drain workers; of several the answers are made one."""

    def __init__(
        self,
        keyring: Keyring,
        registry: RegistryPlace | Sequence[RegistryPlace],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`registry`: its name in the key directory and its endpoint; or several of these."""
        if not may(keyring.role_of(keyring.name), Act.DRAIN):
            raise ControlError(f"name: {keyring.name} is no operator; use one named {m.OPERATOR} or {m.OPERATOR}-…")
        places = [registry] if isinstance(registry[0], str) else list(registry)
        self._clock = clock
        self._lines: list[_RegistryLine] = []
        try:
            for place in places:
                self._lines.append(_RegistryLine(keyring, place, clock))  # type: ignore[arg-type]
        except ControlError:
            self._close()
            raise

    def __enter__(self) -> OperatorLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close()

    def drain(self, worker: WorkerId, incarnation: int, timeout_s: float) -> m.DrainState | None:
        """Have a worker drained, and hear how far it is; None when no answer came in time.

        `incarnation` is 0 at first, then the answer's, so that a worker which was started again is left alone.
        """
        until = self._clock() + timeout_s
        said = self._ask(worker, incarnation, timeout_s)
        if incarnation or said is None or said.state != "draining" or not said.incarnation:
            return said
        return self._ask(worker, said.incarnation, max(until - self._clock(), SILENT_S)) or said

    def look(self, worker: WorkerId, timeout_s: float) -> m.DrainState | None:
        """How a worker stands, and who is ready in its role beside it; changes nothing. None when no answer came in
        time; without a role from a registry of the release before, which knows no look."""
        return self._ask(worker, 0, timeout_s, look=True)

    def _ask(self, worker: WorkerId, incarnation: int, timeout_s: float, *, look: bool = False) -> m.DrainState | None:
        begun = self._clock()
        for line in self._lines:
            line.begin(worker, incarnation, look=look)
        while (now := self._clock()) < begun + timeout_s:
            for line in self._lines:
                line.turn(now)
            waited_for = [line for line in self._lines if line.said is None]
            answered = len(waited_for) < len(self._lines)
            if not waited_for or (answered and all(line.silent and now >= begun + SILENT_S for line in waited_for)):
                break
            left_s = begun + timeout_s - now
            waited_for[0].control.wait(min(left_s, REPEAT_S if len(waited_for) == 1 else SLICE_S))
        for line in self._lines:
            line.silent = line.said is None
        said = [line.said for line in self._lines if line.said is not None]
        if look:
            said = [each for each in said if each.role or each.state == "unknown"] or said
        return min(said, key=_rank) if said else None

    def _close(self) -> None:
        for line in self._lines:
            line.control.close()


def _rank(said: m.DrainState) -> tuple[int, int, bool]:
    return _STATES.index(said.state), -len(said.workers) if said.role else 0, not said.held


class _RegistryLine:
    """One registry."""

    def __init__(self, keyring: Keyring, place: RegistryPlace, clock: Callable[[], float]) -> None:
        try:
            address = check_endpoint(place[1], names=True)
        except ValueError as error:
            raise ControlError(f"registry: {error}") from None
        if place[0] not in keyring.peers:
            raise ControlError(f"{place[0]}: not in the key directory; give the registry's name there")
        self.said: m.DrainState | None = None
        self.silent = False  # it did not answer the last question
        self._registry = place[0]
        self._keyring = keyring
        self._question = m.DrainWorker(place[0])
        self._ask_at = 0.0
        self.control = ZmqControl(keyring, None, LIMITS, clock)
        self.control.set_directory({self._registry: (address, "")})  # under whichever key it has

    def begin(self, worker: WorkerId, incarnation: int, *, look: bool = False) -> None:
        incarnation = NO_LIFE if look else incarnation
        order = drain_order(self._keyring, worker, Incarnation(incarnation)) if incarnation else None
        self.said, self._question, self._ask_at = None, m.DrainWorker(worker, incarnation, order, look), -REPEAT_S

    def turn(self, now: float) -> None:
        """Ask, and hear what has come."""
        if self.said is None and now >= self._ask_at:
            self._ask_at = now + REPEAT_S
            self.control.send(self._registry, m.encode(self._question))
        for _, frame in self.control.receive():
            self._take(frame)

    def _take(self, frame: bytes) -> None:
        try:
            said = m.decode_to_operator(frame)
        except m.RegistryFault:
            return
        if isinstance(said, m.RegistryRefused):
            raise ControlError(f"the registry refused: {said.detail}")
        question = self._question
        is_of_look = bool(said.role) or said.incarnation == NO_LIFE  # and may come late
        is_asked = not is_of_look and question.incarnation in (0, said.incarnation)
        if said.worker == question.worker and (question.look or is_asked):
            self.said = said
