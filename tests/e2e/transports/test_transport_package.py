"""A handoff between worker processes over a transport that another package has brought."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbaton.api.params import Mode
from tests.e2e.transports.test_planes import WORKER, cluster
from tests.transports.example_package import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


async def test_an_installed_transport_hands_over_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(install(tmp_path / "package")), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    async with cluster(tmp_path, "procfs", {"d0": (*WORKER, "--transport", "procfs,tcp")}) as here:
        for mode in Mode:
            await here.asked(4, mode, "package")
        told = (await here.at_rest())["d0"]
        assert told["links"] == {"p0": "procfs"} and told["ends_total"] == {"delivered": 4 * len(Mode)}
