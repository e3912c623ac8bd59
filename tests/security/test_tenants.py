"""Tenants that say so with a `cache_salt` share no KV: not by handoff, not by prefix, not by the store.

Promise 1 seen from a neighbour's side: what one tenant computed can be neither read nor timed by another.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from kvbaton.api.params import TransferParams
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.engines.embedded.http_worker import Finished, Token
from kvbaton.engines.embedded.server_plan import GenerateRequest
from tests.e2e.pair import pair
from tests.e2e.store.storehouse import house, key_directory, some_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = "what one tenant asked and no other tenant may learn of it " * 3
TOKENS = 8


async def ask(worker: EmbeddedWorker, salt: str, tokens: int = TOKENS, params: Any = None) -> tuple[str, Finished]:
    """The answer, and how it ended."""
    text, end = "", None
    request = GenerateRequest(
        request_id=secrets.token_hex(8),
        prompt=tuple(tokenizer.encode(PROMPT)),
        max_tokens=tokens,
        temperature=0.0,
        cache_salt=salt,
        handoff=params,
    )
    async for event in worker.backend.generate(request):
        if isinstance(event, Token):
            text += event.text
        else:
            end = event
    assert end is not None
    return text, end


async def test_a_ticket_of_one_tenant_shows_another_nothing(tmp_path: Path) -> None:
    right = reference_answers([PROMPT], TOKENS)[0]
    async with pair(tmp_path, p={"lease_s": 8.0}) as made:  # plenty, and less than `at_rest` waits
        for mine, theirs, delivered in (("a", "a", 1), ("a", "b", 1), ("a", "", 1), ("", "", 2)):
            _, end = await ask(made.p, mine, 1, TransferParams(do_remote_decode=True))
            given = TransferParams.parse(dict(end.kv_transfer_params or {}))
            text, _ = await ask(made.d, theirs, TOKENS, given)
            assert text == right, "refused or recomputed, never wrong"
            assert made.ends().get("delivered", 0) == delivered, (mine, theirs)
        await made.at_rest()


async def test_a_prefix_of_one_tenant_is_no_hit_for_another(tmp_path: Path) -> None:
    async with pair(tmp_path) as made:
        cached = [(await ask(made.d, salt))[1].cached_tokens for salt in ("a", "a", "b", "", "b")]
        assert [count > 0 for count in cached] == [False, True, False, False, True]


async def test_a_store_gives_one_tenants_blocks_to_no_other(tmp_path: Path) -> None:
    directory = key_directory(tmp_path)
    with some_store("kvbaton", directory) as store:
        async with house(directory, store, "p0", "d0") as both:
            await ask(both["p0"], "a")
            await both.until(lambda: both.stat("p0", "store_puts_total") == 1)
            hits = []
            for salt in ("b", "", "a"):
                await ask(both["d0"], salt)
                hits.append(both.stat("d0", "store_hits_blocks_total"))
            assert hits[:2] == [0, 0] and hits[2] > 0
            await both.at_rest()
