"""Configuration is one frozen, checked value: what is nonsense is refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.numbers import DURATION_S_MIN, TERM_S_MIN
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


@pytest.mark.parametrize("field", [field for field in FIELDS if field.endswith(("_s", "_timeout"))])
@pytest.mark.parametrize("value", [1e-300, 0.049, 604_801.0, 1e300])
def test_a_duration_that_no_node_could_keep_is_refused_by_name(field: str, value: float) -> None:
    """What a node promises to its peers is within what they believe."""
    changes: dict[str, Any] = {"max_hold_s": 604_800.0, field: value}
    with pytest.raises(ProtocolError, match=rf"{field}: got .*, expected 0\.\d+ to 604800 seconds"):
        Settings(**changes)


def test_a_lease_lasts_for_three_of_the_shortest_intervals() -> None:
    with pytest.raises(ProtocolError, match=r"lease_s: got 0.1, expected 0.15 to 604800 seconds"):
        Settings(lease_s=0.1)
    assert Settings(lease_s=0.15).lease_s == 0.15 > TERM_S_MIN and round(0.15 / DURATION_S_MIN) == 3


def test_a_misspelt_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="lease_seconds"):
        msgspec.convert({"lease_seconds": 3}, Settings)
