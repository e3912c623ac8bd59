"""A P gives false KV for prompts that it was asked to compute, as no one can prevent; then its key is removed.

From then on no answer is wrong: not from D's cache, nor by turns from P's, nor from the store.

Before, of answers after the removal: from D's cache 5 of 5 wrong, from a P that had taken a turn from D 9 of 12, from
the store 12 of 12, also after a restart of everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbaton_proof.chaos.liars.false_worker import BAIT
from tests.security.members.betrayed import Betrayed, betrayed
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ASKED = 6
RESET_S = 20.0
NAMES = ("liar", "p0", "d0", "d1", "store")


def _lied_to(made: Betrayed, mode: str = "pull", **more: Any) -> None:
    """A cluster of a liar and d0, which has answered `ASKED` prompts on the liar's word."""
    made.worker("d0", "decode", **more)
    made.worker("liar", "prefill", "false-kv", **more)
    made.router("--fallback", "local", "--turn-s", "60")
    made.serving("liar", "d0")
    assert made.ask(ASKED, mode, salt=BAIT).wrong == ASKED, "the lie is the liar's own word, and believed"


def _right(made: Betrayed, mode: str = "pull") -> None:
    got = made.ask(ASKED, mode, salt=BAIT)
    assert got.right == ASKED, (got, made.failed)


def _resets(made: Betrayed, name: str) -> None:
    """Each process looks at the key directory every 2 s by itself."""
    until(lambda: "[cache-reset]" in made.log(name), RESET_S)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_cache_of_a_d_keeps_nothing_of_a_p_whose_key_was_removed(tmp_path: Path, mode: str) -> None:
    with betrayed(tmp_path, *NAMES) as made:
        _lied_to(made, mode)
        made.worker("p0", "prefill")
        made.remove("liar")
        made.serving("p0", "d0")
        _resets(made, "d0")
        _right(made, mode)


def test_a_p_that_took_a_turn_of_such_a_d_keeps_nothing_either(tmp_path: Path) -> None:
    with betrayed(tmp_path, *NAMES) as made:
        _lied_to(made, turn_s=60.0)
        made.end("liar", 15)
        made.worker("p0", "prefill", turn_s=60.0)
        made.serving("p0", "d0")
        made.go_on()
        assert made.ask(ASKED, salt=BAIT).wrong, "d0 hands on what it was told"
        assert made.stats("p0")["turn_loads_total"].get("taken"), "and p0 takes it"
        made.command("keys", "remove", made.keys, "liar")
        made.end("d0", 15)
        made.worker("d1", "decode", turn_s=60.0)
        made.serving("p0", "d1")
        _resets(made, "p0")
        _right(made)


def test_the_store_gives_nothing_of_a_writer_that_was_removed(tmp_path: Path) -> None:
    with betrayed(tmp_path, *NAMES) as made:
        disk = ("--disk", str(tmp_path / "disk"), "--bytes", str(1 << 20))
        store = made.store(*disk)
        _lied_to(made, store=store)
        made.remove("liar")
        made.end("liar")
        made.end("d0")
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            made.worker(name, role, store=store)
        made.serving("p0", "d0")
        _right(made)
        for name in ("store", "p0", "d0"):  # what lay on the disk is found again, and is no truer
            made.end(name, 15)
        made.store(*disk)
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            made.worker(name, role, store=store)
        made.serving("p0", "d0")
        _right(made)
