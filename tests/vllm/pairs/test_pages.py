"""The pages that start vLLM by hand, followed word for word. What they promise is seen, and so is what they are for.

`make test` follows the page of the shared store, whose engines then have their answers compared; `make vllm-full`
follows that of one host as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.duo import BLOCK, TOKENS, prompt_of, same
from tests.vllm.engines import Engine
from tests.vllm.page_run import PageRun, figures
from tests.vllm.stores import LENGTHS, SEED, come_to_rest, share

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def page(
    request: pytest.FixtureRequest, tmp_path: Path, vllm_python: str, tiny: Callable[[str], Path]
) -> Iterator[PageRun]:
    (tmp_path / "MODEL").symlink_to(tiny("llama"))  # the page's command finds it made, and saves its seconds
    run = PageRun(request.param, tmp_path, vllm_python)
    try:
        yield run
    finally:
        run.close()


@pytest.mark.parametrize("page", ["docs/store.md"], indirect=True)
def test_what_one_engine_put_another_loads(page: PageRun, plain: Engine) -> None:
    page.until_ready()
    plain.wait_ready()
    writer, reader, store = page.engines["8100"], page.engines["8200"], page.serving["7710"]
    share(writer, reader, plain, lambda: figures(store)["values"])

    longer = [*prompt_of(LENGTHS[-1], SEED)[: 6 * BLOCK], *prompt_of(200, "another end")]
    assert same(reader.ask(longer, TOKENS), plain.ask(longer, TOKENS)), "a beginning that is alike"

    page.to_the_end()
    first, second, counted = page.said[-3:]
    assert json.loads(first)["choices"][0]["text"] == json.loads(second)["choices"][0]["text"]
    assert "kvbaton_store_hits_blocks_total" in counted and "vllm:external_prefix_cache_hits_total" in counted

    store.kill9()  # with the store gone, engines compute
    other = prompt_of(900, "no store")
    assert same(reader.ask(other, TOKENS), plain.ask(other, TOKENS))
    come_to_rest(writer, reader)


@pytest.mark.parametrize("page", ["docs/vllm-guide.md"], indirect=True)
def test_a_pair_started_by_hand_hands_over(page: PageRun) -> None:
    page.to_the_end()
    workers, answer, _, delivered, *drained = page.said[-6:]
    assert {'"p0"', '"d0"'} <= set(workers.replace(",", " ").replace(":", " ").split())
    assert json.loads(answer)["choices"][0]["text"]
    assert float(delivered.split()[-1]) >= 1
    assert all("idle" in said for said in drained)
