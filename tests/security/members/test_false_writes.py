"""Push: a P that says Written and has written nothing, less, elsewhere or later. D decodes on nothing of it.

Before D asked its ranks what was written: over tcp 48 of 48 answers of each lie were wrong with status 200, of the one
with a byte missing 23."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton_proof.chaos.liars.false_worker import WRITES
from tests.security.members.betrayed import Betrayed, betrayed
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ASKED = 12


@pytest.fixture(scope="module", params=["tcp", "shm"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Betrayed]:
    with betrayed(tmp_path_factory.mktemp("writes"), "liar", "p0", "d0") as made:
        made.transport = request.param
        made.worker("d0", "decode", transport=request.param)
        made.router("--fallback", "local")
        yield made


@pytest.mark.parametrize("lie", WRITES)
def test_a_handoff_is_delivered_only_if_its_blocks_were_written(cluster: Betrayed, lie: str) -> None:
    cluster.worker("liar", "prefill", lie, transport=cluster.transport)
    try:
        cluster.serving("liar", "d0")
        fresh = cluster.ask(ASKED, "push")
        tenants = [cluster.ask(ASKED // 2, "push", salt=f"{lie} {number}") for number in range(2)]
        assert [fresh.right, *(each.right for each in tenants)] == [ASKED, ASKED // 2, ASKED // 2], cluster.failed
    finally:
        cluster.end("liar", 15)
        until(lambda: set(cluster.states()) == {"d0"})
