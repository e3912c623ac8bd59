"""Members that name places which are not theirs, and members that reach for memory which was not lent to them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvbaton.control import keyring as keys
from kvbaton.proof.chaos.liars import lies
from kvbaton.proof.chaos.liars.liar_http import Door
from kvbaton.proof.chaos.liars.liar_post import Errand, Member
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from tests.security.betrayed import betrayed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ASKED = 8


def test_a_member_names_no_address_but_those_it_connects_from(tmp_path: Path) -> None:
    """Another service of the private network would get the prompts: before, 8 of 8."""
    with betrayed(tmp_path, "p0", "d0", "liar") as made:
        key = keys.load(made.keys, "router").ticket_keys[0]
        victim = Door("127.0.0.2", PeerId(WorkerId("victim"), Incarnation(7)), key, random.Random(1))
        victim.answer = "steal"
        try:
            made.worker("p0", "prefill")
            made.worker("liar", "decode", f"names={victim.address}")
            made.worker("d0", "decode")
            made.router("--fallback", "local")
            made.serving("p0", "d0")
            got = made.ask(ASKED)
            assert (got.right, len(victim.asked)) == (ASKED, 0)
            assert "http_address" in made.log("liar")
        finally:
            victim.close()


def test_a_greeting_alone_maps_no_memory(tmp_path: Path) -> None:
    """shm: before, a Hello without a ticket was given all of a rank's registered KV."""
    with betrayed(tmp_path, "p0", "d0", "liar") as made:
        made.worker("p0", "prefill", transport="shm")
        made.worker("d0", "decode", transport="shm")
        made.router("--fallback", "local")
        made.serving("p0", "d0")
        assert made.ask(ASKED).right == ASKED
        controls = {each.registration.worker: each.registration.control_endpoint for each in made.registry.workers()}
        errand = Errand(
            keys=made.keys,
            name="liar",
            guise=lies.Guise.DECODE,
            address="127.0.0.1",
            members={
                "p0": Member("prefill", controls[WorkerId("p0")], made.address("p0")),
                "router": Member("router", made.registry.endpoint, f"127.0.0.1:{made.ports['router']}"),
            },
            lies=("map-all@p0",),
            seconds=2.0,
            seed=1,
        )
        words = [sys.executable, "-m", "kvbaton.proof.chaos.liars.liar_main", msgspec.json.encode(errand).decode()]
        done = subprocess.run(words, capture_output=True, timeout=60, check=True)
        tally = lies.decode(done.stdout)
        assert tally.of("map-all").told
        assert tally.problems() == []
