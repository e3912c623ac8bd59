"""How a handoff finished: delivered, or failed with a reason."""

from __future__ import annotations

from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason


def test_an_end_without_reason_is_a_delivery() -> None:
    assert End().delivered
    assert not End(Reason.STALE, good_tokens=4).delivered
