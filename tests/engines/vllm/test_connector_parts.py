"""An engine whose workers have said nothing: a prompt whose KV was promised fails where failed loads fail."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PROMISED = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_block_ids": [1, 2]}
NOTHING = (0, False)


def asked(params: Any) -> Any:
    return SimpleNamespace(request_id="r", num_prompt_tokens=40, kv_transfer_params=params)


@pytest.fixture(name="before")
def before_of(adapter: Callable[[str], ModuleType]) -> Callable[[bool], Any]:
    return lambda fails: adapter("connector_parts").BeforeRanks(fails=fails)


def test_a_promised_prompt_gets_blocks_and_one_report_that_it_failed(before: Callable[[bool], Any]) -> None:
    engine = before(True)
    assert engine.match(asked(PROMISED), 16) == (24, True)
    engine.allocated(asked(PROMISED), 24)
    (verdict,) = engine.take_verdicts()
    assert (verdict.request_id, verdict.failed, verdict.is_good) == ("r", True, False)
    assert engine.take_verdicts() == ()


def test_where_failed_loads_are_computed_it_is_computed(before: Callable[[bool], Any]) -> None:
    assert before(False).match(asked(PROMISED), 0) == NOTHING


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"do_remote_prefill": "yes"}, "prefill", [1]])
def test_other_requests_are_computed(before: Callable[[bool], Any], params: Any) -> None:
    engine = before(True)
    assert engine.match(asked(params), 0) == NOTHING
    engine.allocated(asked(params), 0)
    assert engine.take_verdicts() == ()


def test_a_prompt_that_is_there_already_needs_no_load(before: Callable[[bool], Any]) -> None:
    assert before(True).match(asked(PROMISED), 40) == NOTHING
