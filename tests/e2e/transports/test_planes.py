"""Handoffs between worker processes over each data plane, and over the next one where the best cannot be opened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvbaton.api.params import Mode
from kvbaton.control import keyring
from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.local_cluster.router_front import Sources, run_router
from kvbaton.router.router_settings import Fallback, RouterSettings
from tests.e2e import warm_workers
from tests.e2e.cluster import ask_all, eventually, some_prompts
from tests.e2e.router.fleet import HELD, START_S, Member, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

WORKER = ("-m", "kvbaton.cli.main", "worker")
CUT_OFF = str(Path(__file__).with_name("cut_off_worker.py"))
PLANES = ("shm", "tcp", "nixl", "mooncake")
ANSWER_TOKENS = 8
REST_S = 30.0
DOCTOR_S = 60.0


@dataclass
class Cluster:
    """A router in this process, a prefill worker and several decode workers in their own."""

    url: str
    p: Member
    ds: Mapping[str, Member]

    async def asked(self, count: int, mode: str, tag: str) -> None:
        """So many new prompts at once; all are answered, and right."""
        prompts = some_prompts(count, f"{tag} {mode}")
        answers, right = await asyncio.gather(
            ask_all(self.url, prompts, mode, ANSWER_TOKENS),
            asyncio.to_thread(reference_answers, prompts, ANSWER_TOKENS),
        )
        assert [(answer.status, answer.text) for answer in answers] == [(200, text) for text in right]

    async def at_rest(self) -> dict[str, dict[str, Any]]:
        """What each D says of itself, once nobody holds anything for anybody."""

        async def look() -> dict[str, dict[str, Any]]:
            told = {member.name: await member.stats() for member in (self.p, *self.ds.values())}
            assert not any(stats["faults_total"] for stats in told.values()), told
            held = any(stats[key] for stats in told.values() for key in (*HELD, "quarantined_blocks"))
            free = all(stats["free_blocks"] == stats["blocks"] for stats in told.values())
            return {name: told[name] for name in self.ds} if free and not held else {}

        return dict(await eventually(look, REST_S))

    async def d_and_p(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a P whose ports may have failed: what the one D, and what P say of themselves."""
        (d,) = self.ds.values()
        return dict(await d.stats()), dict(await self.p.stats())

    async def doctor(self) -> dict[str, dict[str, Any]]:
        """What `kvbaton doctor` finds at each worker; its verdict must be good."""
        words = (*WORKER[:2], "doctor", "--router", self.url, "--json")
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), DOCTOR_S)
        found = json.loads(out)
        assert process.returncode == 0 and found["well"], found
        return {worker["worker"]: worker for worker in found["workers"]}


@contextlib.asynccontextmanager
async def cluster(
    directory: Path,
    p_planes: str,
    ds: Mapping[str, Sequence[str]],
    p_flags: Sequence[str] = (),
    p_words: Sequence[str] = WORKER,
) -> AsyncIterator[Cluster]:
    """`ds`: the words that start each decode worker, before those that say who and where it is."""
    keyring.mint(directory / "keys", ["router", "p0", *ds])
    sources = Sources(keyring=keyring.load(directory / "keys", "router"), registry_bind="tcp://127.0.0.1:0")
    settings = RouterSettings(policy="round-robin", decode_retries=0, prefill_retries=0, fallback=Fallback.STRICT)
    async with run_router(sources, settings, host="127.0.0.1", port=0) as front:
        where = ("--keys", str(directory / "keys"), "--registry", front.registry_endpoint)
        members: list[Member] = []
        try:
            for name, words in {"p0": (*p_words, "--transport", p_planes, *p_flags), **ds}.items():
                role = "prefill" if name == "p0" else "decode"
                log = directory / f"{name}.log"
                process = warm_workers.start((*words, "--name", name, "--role", role, *where), log)
                members.append(Member(name, process, log))
            for member in members:
                member.url = await eventually(_said(member), START_S)
            for member in members:
                await eventually(_knows(member, len(members) - 1), START_S)
            yield Cluster(front.url, members[0], {member.name: member for member in members[1:]})
        finally:
            codes = await asyncio.gather(*map(stop, members))
    assert codes == [0] * len(members), [member.log.read_text()[-2000:] for member in members]


def _said(member: Member) -> Any:
    async def look() -> str:
        return member.has_spoken()

    return look


def _knows(member: Member, others: int) -> Any:
    async def look() -> bool:
        return int((await member.stats())["peers"]) == others

    return look


def _all_delivered(told: Mapping[str, Mapping[str, Any]], count: int) -> None:
    """That many handoffs, none of which ended in any other way, and each D had its share."""
    ends = [stats["ends_total"] for stats in told.values()]
    assert all(each.keys() == {"delivered"} for each in ends) and sum(each["delivered"] for each in ends) == count, told


@pytest.mark.library("nixl", "mooncake")
async def test_every_plane_hands_over_in_every_mode(tmp_path: Path) -> None:
    """Promises 1 and 3: one P that has them all, and a D for each."""
    plane_of = {f"d-{plane}": plane for plane in PLANES}
    count = 6 * len(PLANES)

    words = {name: (*WORKER, "--transport", plane) for name, plane in plane_of.items()}
    async with cluster(tmp_path, ",".join(PLANES), words) as here:
        before = dict.fromkeys(plane_of, 0)
        for turn, mode in enumerate(Mode, 1):
            await here.asked(count, mode, "planes")
            told = await here.at_rest()
            _all_delivered(told, turn * count)
            after = {name: stats["delivered_total"] for name, stats in told.items()}
            assert all(after[name] > before[name] for name in plane_of), (mode, before, after)
            before = after
        for name, plane in plane_of.items():
            assert told[name]["links"] == {"p0": plane} and told[name]["links_total"] == {plane: 1}
            assert told[name]["planes_given_up_total"] == {}
        found = await here.doctor()
        assert {name: found[name]["links"] for name in plane_of} == {
            name: {"p0": plane} for name, plane in plane_of.items()
        }
        assert found["p0"]["planes"] == list(PLANES)


async def test_a_worker_that_cannot_share_memory_takes_tcp_for_its_first_handoff(tmp_path: Path) -> None:
    """No handoff is lost, none is recomputed, and an operator can see it."""
    flags = ("--transport", "shm,tcp", "--policy", "fail")
    cut_off = {"d-namespace": "namespace", "d-door": "door"}
    words = {name: (CUT_OFF, how, "worker", *flags) for name, how in cut_off.items()} | {"d-well": (*WORKER, *flags)}
    takes = dict.fromkeys(cut_off, "tcp") | {"d-well": "shm"}
    given_up: dict[str, dict[str, int]] = {name: {"shm": 1} for name in cut_off} | {"d-well": {}}
    async with cluster(tmp_path, "shm,tcp", words) as here:
        await here.asked(len(words), Mode.PULL, "first")
        told = await here.at_rest()
        _all_delivered(told, len(words))
        assert {name: stats["planes_given_up_total"] for name, stats in told.items()} == given_up
        for turn, mode in enumerate(Mode, 1):
            await here.asked(12, mode, "then")
            _all_delivered(told := await here.at_rest(), len(words) + 12 * turn)
        assert {name: stats["links"] for name, stats in told.items()} == {name: {"p0": takes[name]} for name in words}
        assert {name: stats["links_total"] for name, stats in told.items()} == {
            **{name: {"shm": 1, "tcp": 1} for name in cut_off},
            "d-well": {"shm": 1},
        }
        for name in cut_off:
            assert "p0 cannot be reached over shm" in here.ds[name].log.read_text()
        found = await here.doctor()
        assert {name: found[name]["links"]["p0"] for name in words} == takes
        assert {name: found[name]["given_up_total"] for name in words} == given_up


async def test_a_source_that_cannot_offer_its_best_plane_gives_the_next(tmp_path: Path) -> None:
    words = {"d0": (*WORKER, "--transport", "shm,tcp", "--policy", "fail")}
    async with cluster(tmp_path, "shm,tcp", words, p_words=(CUT_OFF, "mint", "worker")) as here:
        await here.asked(4, Mode.PULL, "mint")
        stats, source = await here.d_and_p()
        assert stats["ends_total"] == {"delivered": 4} and stats["links"] == {"p0": "tcp"}
        assert source["planes_given_up_total"] == {"shm": 1}
