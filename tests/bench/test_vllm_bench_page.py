"""The lab page: what it says can be repeated elsewhere."""

from __future__ import annotations

from kvbaton_proof.bench.kit.run_facts import public


def test_a_page_does_not_tell_where_things_lie_on_this_machine() -> None:
    command = "env A=1 /home/me/.venv/bin/python -m x --model /root/.cache/kvbaton/m --keys /tmp/kvbaton-bench-abc/keys"
    assert public(command) == "env A=1 python -m x --model ~/.cache/kvbaton/m --keys DIR/keys"
