"""What a command does not need is not imported: a router that takes a second to start is a second without a router."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "aiohttp")
CODE = f"""
import sys
from kvbaton.cli.main import module_of
for command in ("router", "registry", "up", "bench"):
    module_of(command)
    print(*(name for name in {HEAVY} if name in sys.modules))
"""


def test_neither_a_router_nor_a_registry_nor_a_cluster_here_needs_numpy_or_aiohttp_to_start() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n" * 4
