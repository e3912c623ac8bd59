"""Strangers at every listening port of a cluster: nobody is let in, and nobody else notices.

Promises 2 to 5. Ports are found by asking the kernel, so that none is forgotten; `docs/security.md` lists them all.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton_proof.chaos.strangers import KINDS, LET_IN, Place, is_local, listening
from tests.e2e.cluster import all_at_rest
from tests.e2e.pair import pair
from tests.security.strangers.besieged import Intruders, Siege, protocol_of, siege
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

IDLE_PER_PORT = 1000
THREADS_MAX = 160
"""More than at rest: a store has a thread for each that greets, at most 128, and for a moment for those it refused; not
for each of a thousand strangers."""
ROWS = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with siege(tmp_path_factory.mktemp("town"), "--store", "memory", "--transport", "tcp") as made:
        yield made


def well(town: Siege) -> None:
    """All that lived live, nothing went wrong inside, and nothing is held."""
    assert all(os.path.exists(f"/proc/{pid}") for pid in town.pids)
    stats = asyncio.run(all_at_rest(town.cluster, {"p0", "d0"}))
    assert [each["faults_total"] for each in stats.values()] == [0, 0]


def listed_ports() -> Counter[tuple[str, str]]:
    """(process, protocol) of each row of the table of ports that `kvbaton up` has open with tcp and a store."""
    table = ROWS.read_text().split("<!-- ports -->")[1].split("<!-- /ports -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return Counter((row[0], row[2]) for row in rows if row[5] == "yes")


def test_what_listens_is_what_the_table_says_and_only_on_loopback(town: Siege) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for pid in town.pids:
        name = town.name(pid)
        for place in listening([pid]):
            assert is_local(place), f"{name} listens on {place}"
            found[("worker" if name in ("p0", "d0") else name, protocol_of(place))] += 1
    assert {key: count // (2 if key[0] == "worker" else 1) for key, count in found.items()} == dict(listed_ports())


async def _places_of_a_pair(tmp_path: Path) -> tuple[list[Place], list[str]]:
    before = set(listening([os.getpid()]))
    async with pair(tmp_path, transport="shm") as made:
        for mode in ("pull", "push"):
            await made.answer(f"a prompt {mode}", mode)
        await made.at_rest()
        found = sorted(set(listening([os.getpid()])) - before)
        return found, sorted([await asyncio.to_thread(protocol_of, place) for place in found])


def test_shared_memory_has_abstract_sockets_and_no_port(tmp_path: Path) -> None:
    found, spoken = asyncio.run(_places_of_a_pair(tmp_path))
    doors = [place for place in found if place[0].startswith("\0kvbaton-")]
    assert len(doors) == 2, "P and D, one each"
    assert spoken == ["data", "data", "zmtp", "zmtp"]
    assert all(is_local(place) for place in found)


def test_visits_of_every_kind_cost_no_honest_client_an_answer(town: Siege) -> None:
    with Intruders(town.places(), 6.0, keys=town.public_keys()) as strangers:
        strangers.line()
        figures = town.honest(5.0)
        counts = strangers.line()
    assert not figures.bad and figures.right >= 4
    assert not [word for word in counts if word.startswith(LET_IN)]
    assert all(counts[kind.name] >= 5 for kind in KINDS), counts
    well(town)


def test_a_thousand_silent_connections_at_every_port_take_nobodys_place(town: Siege) -> None:
    places = town.places()
    before = town.uses()
    with Intruders(places, 0.0, each=IDLE_PER_PORT) as strangers:
        assert strangers.line()["idle"] == IDLE_PER_PORT * len(places)
        until(lambda: all(use.threads <= before[name].threads + THREADS_MAX for name, use in town.uses().items()))
        during = town.uses()
        figures = town.honest(3.0)
        strangers.go()
    assert not figures.bad and figures.right >= 4
    for name, use in during.items():
        ports = sum(1 for pid in town.pids if town.name(pid) == name for _ in listening([pid]))
        assert use.fds <= before[name].fds + IDLE_PER_PORT * ports + 64
        assert use.rss_mib <= before[name].rss_mib + 64, f"{name} grew"
        assert use.threads <= before[name].threads + THREADS_MAX, f"{name} started threads for strangers"
    until(lambda: all(use.fds <= before[name].fds + 16 for name, use in town.uses().items()))
    well(town)


def unasked_bytes(log: Path) -> int:
    """What a log holds besides the lines of honest requests, of which a fast machine answers many."""
    lines = log.read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in lines if b"POST /v1/completions 200 " not in line)


def test_the_store_and_the_workers_know_the_strangers_only_by_number(town: Siege) -> None:
    """What strangers said is in no log, however much they said."""
    logs = town.key_directory().parent.glob("*.log")
    sizes = {log.name: unasked_bytes(log) for log in logs}
    assert sizes and all(size < 64 << 10 for size in sizes.values()), sizes
