"""Configuration is one frozen, checked value: what is nonsense is refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.settings import Settings

FIELDS = [field.name for field in msgspec.structs.fields(Settings)]


def test_the_defaults_are_sane() -> None:
    """Rule 21: compilation and capture stall an engine for seconds, so leases last at least ten."""
    defaults = Settings()
    assert defaults.lease_s >= 10.0
    assert defaults.retry_s < defaults.revoke_timeout < defaults.claim_timeout
    assert defaults.claim_timeout <= defaults.transfer_timeout <= defaults.max_hold_s


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_a_number_that_is_not_finite_and_above_zero_is_refused_by_name(field: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ProtocolError) as error:
        Settings(**changes)
    assert error.value.reason is Reason.BAD_MESSAGE
    assert error.value.detail == f"{field}: got {value!r}, expected a finite number above 0"


def test_a_lease_cannot_outlast_the_longest_hold() -> None:
    with pytest.raises(ProtocolError, match=r"max_hold_s: 5.0 is below lease_s 15.0"):
        Settings(max_hold_s=5.0)
    assert Settings(max_hold_s=15.0).max_hold_s == 15.0


def test_a_misspelt_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="lease_seconds"):
        msgspec.convert({"lease_seconds": 3}, Settings)
