"""One of two registries lies, with its own valid key: routers and workers lose nothing by it but news (issue: members).

Before statements were signed, of 20 requests each: an added worker got 15 prompts, a redirected D all 20 and answered
them, a later life of its invention likewise; `left` and `draining` of one registry ended all 20 in errors, and the
workers drained and went."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton_proof.chaos.liars.false_registry import LIES, SEALS
from tests.security.members.betrayed import Betrayed, betrayed
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ASKED = 4
TOLD_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Betrayed]:
    with betrayed(tmp_path_factory.mktemp("registry"), "p0", "d0") as made:
        made.worker("p0", "prefill")
        made.worker("d0", "decode")
        made.router("--fallback", "local")
        made.serving("p0", "d0")
        assert made.ask(ASKED).right == ASKED
        yield made


def _serves_as_before(cluster: Betrayed) -> None:
    got = cluster.ask(ASKED)
    assert (got.right, cluster.stolen()) == (ASKED, 0), (got, cluster.failed)
    cluster.serving("p0", "d0")
    assert all(cluster.processes[name].poll() is None for name in ("p0", "d0"))


def _hears(cluster: Betrayed, lie: str, seal: str = "") -> None:
    """Have the lie told until all have heard it; of D's place only routers hear."""
    before = cluster.traitor.told.get(lie, 0)
    cluster.traitor.tell(lie, seal=seal)
    until(lambda: cluster.traitor.told.get(lie, 0) >= before + (1 if lie in ("redirects", "plays-back") else 3), TOLD_S)


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != "plays-back"])
def test_a_registry_that_lies_steals_no_prompt_and_stops_no_answer(cluster: Betrayed, lie: str) -> None:
    try:
        for seal in SEALS:
            _hears(cluster, lie, seal)
            _serves_as_before(cluster)
    finally:
        cluster.traitor.tell("")
    cluster.serving("p0", "d0")


def test_what_a_worker_said_in_an_earlier_life_cannot_be_played_back(cluster: Betrayed) -> None:
    cluster.end("d0")
    cluster.worker("d0", "decode")
    cluster.serving("p0", "d0")
    try:
        _hears(cluster, "plays-back")
        _serves_as_before(cluster)
    finally:
        cluster.traitor.tell("")
