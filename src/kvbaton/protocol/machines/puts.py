"""Putting blocks into a shared store: one pin per put, released when the store no longer reads the blocks.

Law: a put's pin is dropped on entering RELEASED and nowhere else; success, refusal, error and timeout all lead there,
the last only once the store says that it has stopped reading.
"""

from __future__ import annotations

import enum

from kvbaton.protocol.effects import CancelPut, StorePut, UnpinPut
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import PutWanted, StoreEnded
from kvbaton.protocol.ids import PutId
from kvbaton.protocol.legality import Table, Verdict
from kvbaton.protocol.machines.context import LedgerContext


class PutState(enum.Enum):
    PUTTING = "putting"
    CANCELLING = "cancelling"
    RELEASED = "released"


class PutEvent(enum.Enum):
    ENDED = "ended"
    TIMED_OUT = "timed_out"


_S, _E = PutState, PutEvent
PUT = Table(
    "put",
    PutState,
    PutEvent,
    next={
        (_S.PUTTING, _E.ENDED): _S.RELEASED,
        (_S.PUTTING, _E.TIMED_OUT): _S.CANCELLING,
        (_S.CANCELLING, _E.ENDED): _S.RELEASED,
    },
    late={(_S.CANCELLING, _E.TIMED_OUT), (_S.RELEASED, _E.ENDED), (_S.RELEASED, _E.TIMED_OUT)},
)


class Puts:
    """All puts of this node."""

    def __init__(self, desk: LedgerContext) -> None:
        self.desk = desk
        self.states: dict[PutId, PutState] = {}

    def on_wanted(self, event: PutWanted, now: float) -> None:
        if len(self.states) >= self.desk.settings.puts_max:
            self.desk.count("puts.busy")
            self.desk.emit(UnpinPut(event.put))
            return
        self.states[event.put] = PutState.PUTTING
        self.desk.timers.set(("put", event.put), now + self.desk.settings.transfer_timeout)
        self.desk.emit(StorePut(event.put, event.blocks, event.keys, self.desk.origins.names))

    def on_ended(self, event: StoreEnded, now: float) -> None:
        state = self.states.get(event.put, PutState.RELEASED)
        after = PUT.step(state, PutEvent.ENDED)
        if isinstance(after, Verdict):
            self.desk.count("late.put")
            return
        timed_out = state is PutState.CANCELLING
        reason = Reason.TRANSFER_TIMEOUT if timed_out else event.reason
        self.desk.count(f"puts.{reason or 'stored'}")
        del self.states[event.put]
        self.desk.timers.clear(("put", event.put))
        self.desk.emit(UnpinPut(event.put))

    def on_timer(self, put: PutId, now: float) -> None:
        after = PUT.step(self.states[put], PutEvent.TIMED_OUT)
        assert after is PutState.CANCELLING  # the timer is cleared when a put is over, and fires once
        self.states[put] = after
        self.desk.emit(CancelPut(put))
