"""Rule 14: after Written or Quiesced, P never touches the spans again; the outlet's machine has no way back."""

from __future__ import annotations

import pytest

from kvbaton.protocol.legality import Verdict
from kvbaton.protocol.machines.push_writer import OUTLET, OutletEvent, OutletState


def test_nothing_leads_back_to_writing() -> None:
    assert OutletState.WRITING not in OUTLET.next.values()


def test_only_rest_ends_a_stopped_outlet() -> None:
    """Quiesced is a fact about the data plane: an acknowledgement or another stop does not make it."""
    moves = {event for (state, event) in OUTLET.next if state is OutletState.STOPPING}
    assert moves == {OutletEvent.RESTED}


def test_an_acknowledgement_of_what_was_not_written_is_the_peer_s_fault() -> None:
    assert OUTLET.step(OutletState.WRITING, OutletEvent.ACKED) is Verdict.ILLEGAL


@pytest.mark.parametrize("event", OutletEvent)
def test_a_closed_outlet_hears_nothing(event: OutletEvent) -> None:
    assert OUTLET.step(OutletState.CLOSED, event) is Verdict.LATE
