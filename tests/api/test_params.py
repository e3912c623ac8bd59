"""`kv_transfer_params` at the door."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.params import Mode, TransferParams


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("text", "kv_transfer_params"),
        ([1], "kv_transfer_params"),
        ({"do_remote_decode": "yes"}, "kv_transfer_params"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params"),
        ({"do_remote_decode": True, "mode": "smoke"}, "kv_transfer_params"),
        ({"do_remote_prefill": True}, "kv_transfer_params.ticket"),
        ({"do_remote_decode": True, "mode": "push"}, "kv_transfer_params.ticket"),
        ({"do_remote_prefill": True, "ticket": "x" * 2000}, "kv_transfer_params.ticket"),
    ],
)
def test_transfer_params_that_make_no_sense_are_refused_by_field(value: Any, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        TransferParams.parse(value)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_transfer_params_that_hand_nothing_over_are_none_and_foreign_fields_pass() -> None:
    assert TransferParams.parse(None) is None
    assert TransferParams.parse({"do_remote_decode": False}) is None
    given = {"do_remote_prefill": True, "ticket": "t", "mode": "stream", "remote_host": "x", "remote_block_ids": [[1]]}
    parsed = TransferParams.parse(given)
    assert parsed is not None
    assert (parsed.mode, parsed.ticket) == (Mode.STREAM, "t")
