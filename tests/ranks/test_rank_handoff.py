"""Whole engines whose data planes are behind rank links: the answer is still that of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from kvbaton.protocol.ids import PeerId
from kvbaton.ranks import rank_link
from kvbaton.ranks.rank_host import RankHost
from kvbaton.ranks.rank_link import RankLinks
from kvbaton.transports.core.shared_memory import Region
from kvbaton.transports.core.transport import Transport

from ..e2e.pair import pair

PROMPTS = [(f"{n:03d}" + "the quick brown fox jumps over it " * 20)[:n] for n in (14, 33, 100, 400)]


@pytest.fixture(params=["sockets", "near"])
def _linked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Every rank of every worker is served by a host, and seen through a link of its own."""
    if request.param == "sockets":
        monkeypatch.setattr(rank_link, "host_of", lambda invitation: None)
    opened: list[RankHost | RankLinks] = []
    direct = EmbeddedWorker._make_transports

    def linked(self: EmbeddedWorker, me: PeerId, region: Region) -> dict[str, Transport]:
        host = RankHost(0, direct(self, me, region))
        links = RankLinks([host.invitation])
        opened.extend((links, host))
        host.start()
        links.start()
        return dict(links.transports(0))

    monkeypatch.setattr(EmbeddedWorker, "_make_transports", linked)
    yield
    for each in opened:
        assert each.stop()


@pytest.mark.usefixtures("_linked")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_the_answer_is_that_of_one_engine(tmp_path: Path, transport: str, mode: str) -> None:
    asked = [mode + prompt for prompt in PROMPTS]
    async with pair(tmp_path, transport=transport, p={"tp": 2}) as two:
        found = await asyncio.gather(*(two.answer(prompt, mode) for prompt in asked))
        assert list(found) == reference_answers(asked, 12)
        assert two.ends() == {"delivered": len(asked)}
        await two.at_rest()
