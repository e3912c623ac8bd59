"""Members that name places which are not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.betrayed import betrayed, until

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
