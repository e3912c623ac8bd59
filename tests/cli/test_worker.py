"""The worker's flags are the fields of its options, there and back."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.engines.embedded.worker_options import WorkerOptions, argv_of

PLAIN = WorkerOptions(name="p0", role="prefill", keys="k", registry="tcp://127.0.0.1:1")
ALL = WorkerOptions(
    name="d-1.x", role="both", keys="a b", registry="tcp://[::1]:9", registry_name="r", http_host="::1", http_port=5,
    control_host="::1", control_port=6, announce_as="moriio-write", transport="tcp", modes=("push", "pull"), tp=4,
    policy="fail", lease_s=0.5, transfer_timeout=1.5, defer_timeout=2.5, claim_timeout=3.5, drain_s=4.5,
    blocks=9, block_tokens=32, max_num_seqs=2, waiting_max=3, seed=11,
)  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[WorkerOptions]:
    """What `kvbaton.engines.embedded.embedded_worker.main` is given."""
    found: list[WorkerOptions] = []
    module: Any = types.ModuleType("kvbaton.engines.embedded.embedded_worker")
    module.main = lambda options: found.append(options) or 0
    monkeypatch.setitem(sys.modules, "kvbaton.engines.embedded.embedded_worker", module)
    return found


ANNOUNCED = WorkerOptions(
    name="p0", role="prefill", keys="k", registry="tcp://h:1", announce_to="[::1]:30001", announce_as="p2p-nccl",
)  # fmt: skip


@pytest.mark.parametrize("options", [PLAIN, ALL, ANNOUNCED])
def test_options_survive_the_command_line(options: WorkerOptions, seen: list[WorkerOptions]) -> None:
    assert cli.main(["worker", *argv_of(options)]) == 0
    assert seen == [options]


def test_defaults_are_not_repeated_on_the_command_line() -> None:
    assert argv_of(PLAIN) == ["--name", "p0", "--role", "prefill", "--keys", "k", "--registry", "tcp://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"), ({"role": "cook"}, "role"), ({"modes": ()}, "modes"), ({"tp": 0}, "tp"),
        ({"lease_s": float("inf")}, "lease_s"), ({"blocks": 1}, "blocks"), ({"http_port": -1}, "http_port"),
        ({"registry": "x"}, "registry"), ({"policy": "shrug"}, "policy"), ({"transport": "post"}, "transport"),
        ({"announce_as": "nixl"}, "announce_as"), ({"announce_to": "tcp://h:1"}, "announce_to"),
        ({"announce_to": "h:1", "role": "both"}, "role"),
        ({"announce_to": "h:1", "announce_as": "moriio-write", "modes": ("pull", "stream")}, "modes"),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_the_name_of_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: (got |'x' is not tcp)"):
        WorkerOptions(**{"name": "p0", "role": "prefill", "keys": "k", "registry": "tcp://h:1", **change})
