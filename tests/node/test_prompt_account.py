"""D's account of its prompts: the sum over all sources is the prompts' length, and only what a P owed is `alone`."""

from __future__ import annotations

import pytest

from kvbaton.node.prompt_account import HANDOFF, PREFILL, PromptAccount, word_of
from kvbaton.observe.codes.reasons import MISSED, PLANNED, SOURCES, explained
from kvbaton.protocol.errors import Reason


def counted(account: PromptAccount) -> dict[str, int]:
    return {source: count for source, count in account.figures()["prompt_tokens_total"].items() if count}


def alone(account: PromptAccount) -> dict[str, int]:
    found: dict[str, int] = account.figures()["alone_tokens_total"]
    return found


def test_a_delivered_handoff_leaves_the_last_token_to_d() -> None:
    account = PromptAccount()
    account.came("r", 100, HANDOFF)
    account.looked("r", 32)
    account.begun("r", 99)
    assert counted(account) == {"cached": 32, "handoff": 67, "planned": 1}
    assert alone(account) == {}


def test_a_prompt_without_a_handoff_is_computed_alone_but_for_its_last_token() -> None:
    account = PromptAccount()
    account.came("r", 100, "unasked")
    account.looked("r", 32)
    account.begun("r", 32)
    assert counted(account) == {"cached": 32, "planned": 1, "alone": 67}
    assert alone(account) == {"unasked": 67}


def test_what_d_has_cached_is_nobodys_debt() -> None:
    account = PromptAccount()
    account.came("r", 100, "unasked")
    account.looked("r", 99)
    account.begun("r", 99)
    assert counted(account) == {"cached": 99, "planned": 1}
    assert alone(account) == {}


@pytest.mark.parametrize("word", sorted(PLANNED))
def test_what_is_planned_is_not_held_against_anybody(word: str) -> None:
    account = PromptAccount()
    account.came("r", 100, word)
    account.begun("r", 0)
    assert counted(account) == {"planned": 100}


def test_what_a_delivered_handoff_leaves_to_d_is_planned_however_much_it_is() -> None:
    """Behind windows and drafters D computes more than one token."""
    account = PromptAccount()
    account.came("r", 100, HANDOFF)
    account.begun("r", 96)
    assert counted(account) == {"handoff": 96, "planned": 4} and alone(account) == {}


def test_what_had_no_handoff_has_none_that_fails() -> None:
    account = PromptAccount()
    account.came("r", 100, "short")
    account.failed("r", "stale")
    account.begun("r", 0)
    assert counted(account) == {"planned": 100} and alone(account) == {}


def test_a_handoff_that_failed_is_counted_by_its_reason() -> None:
    account = PromptAccount()
    account.came("r", 100, HANDOFF)
    account.looked("r", 0)
    account.failed("r", "stale")
    account.looked("r", 48)  # what was proven good is found in the cache
    account.begun("r", 48)
    assert counted(account) == {"cached": 48, "planned": 1, "alone": 51}
    assert alone(account) == {"stale": 51}


def test_what_the_store_had_instead_is_the_stores() -> None:
    account = PromptAccount()
    account.came("r", 100, HANDOFF)
    account.failed("r", "peer_gone")
    account.looked("r", 16, of_store=True)
    account.begun("r", 96)
    assert counted(account) == {"cached": 16, "store": 80, "planned": 1, "alone": 3}
    assert alone(account) == {"peer_gone": 3}


def test_a_request_is_counted_once_and_forgotten() -> None:
    account = PromptAccount()
    account.came("r", 100, "short")
    account.begun("r", 0)
    account.begun("r", 0)  # computed again after a preemption
    account.came("s", 10, "short")
    account.left("s")
    account.begun("s", 0)
    assert counted(account) == {"planned": 100}
    assert len(account) == 0


def test_what_is_computed_for_others_is_not_in_the_account() -> None:
    account = PromptAccount()
    account.came("r", 100, PREFILL)
    account.looked("r", 10)
    account.failed("r", "stale")
    account.begun("r", 10)
    assert counted(account) == {}
    assert len(account) == 0


def test_a_report_has_the_sums_and_the_main_reasons() -> None:
    account = PromptAccount()
    for size, word in enumerate(("unasked", "no_prefill", "no_pair", "prefill_full", "prefill_failed"), 1):
        account.came(word, size * 10 + 1, word)
        account.begun(word, 0)
    gauges = account.gauges()
    assert gauges["prompt_tokens_total"] == 155
    assert gauges["alone_tokens_total"] == 150
    assert [name for name in gauges if "." in name] == [
        "alone_tokens.prefill_failed", "alone_tokens.prefill_full", "alone_tokens.no_pair", "alone_tokens.no_prefill"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (None, "unasked"),
        ("text", "unasked"),
        ({}, "unasked"),
        ({"do_remote_decode": True, "do_remote_prefill": False}, PREFILL),
        ({"do_remote_prefill": True, "ticket": "t"}, HANDOFF),
        ({"do_remote_prefill": True, "empty": True}, "nothing"),
        ({"do_remote_prefill": True, "empty": True, "refused": "pins_full"}, "prefill_full"),
        ({"alone": "short"}, "short"),
        ({"alone": "no_prefill"}, "no_prefill"),
        ({"alone": "a word of the client's own"}, "unasked"),
        ({"alone": ["short"]}, "unasked"),
    ],
)
def test_parameters_say_who_computes_the_prompt(raw: object, word: str) -> None:
    assert word_of(raw) == word


def test_every_reason_has_an_explanation_and_a_next_step() -> None:
    for reason in (*MISSED, *Reason, "a reason of tomorrow"):
        assert all(explained(reason))
    assert "stale" in explained("stale")[0]
    assert set(SOURCES) >= {"planned", "alone"}
