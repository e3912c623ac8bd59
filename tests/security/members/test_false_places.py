"""Members that name places which are not theirs, and members that reach for memory which was not lent to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvbaton.protocol.ids import WorkerId
from kvbaton_proof.chaos.liars import lies
from kvbaton_proof.chaos.liars.liar_post import Errand, Member
from tests.security.members.betrayed import betrayed
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ASKED = 8


@pytest.mark.parametrize("place", ["10.9.8.7:80", "router"])
def test_a_member_names_no_address_but_its_own(tmp_path: Path, place: str) -> None:
    """Another service of a private network would get the prompts, or the router its own requests again and again."""
    with betrayed(tmp_path, "p0", "d0", "liar") as made:
        named = f"127.0.0.1:{made.ports['router']}" if place == "router" else place
        made.worker("p0", "prefill")
        made.router("--fallback", "local")
        made.worker("liar", "decode", f"names={named}")
        until(lambda: " serves " in made.log("liar"))
        made.worker("d0", "decode")
        made.serving("p0", "d0")
        assert made.ask(ASKED).right == ASKED
        assert set(made.states()) == {"p0", "d0"}


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
        words = [sys.executable, "-m", "kvbaton_proof.chaos.liars.liar_main", msgspec.json.encode(errand).decode()]
        done = subprocess.run(words, capture_output=True, timeout=60, check=True)
        tally = lies.decode(done.stdout)
        assert tally.of("map-all").told
        assert tally.problems() == []
