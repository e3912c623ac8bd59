"""All fuzzed targets by name, and the inputs that are kept for them.

corpus/<target>/    what exploration found worth keeping, small; replaced as a whole by `tools/fuzz.py keep`
crashes/<target>/   what once broke a law, named after what it did; run first, by every run, for ever
"""

from __future__ import annotations

from pathlib import Path

import targets_api
import targets_control
import targets_flight
import targets_ledger
import targets_planes
import targets_protocol
import targets_router
from guided import Target

HERE = Path(__file__).parent
CORPUS, CRASHES = HERE / "corpus", HERE / "crashes"
CORPUS_BYTES_MAX = 1 << 20
"""Of all kept inputs together."""

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (
        targets_protocol,
        targets_api,
        targets_control,
        targets_planes,
        targets_router,
        targets_ledger,
        targets_flight,
    )
    for target in module.TARGETS
}


def kept(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def crashes(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((CRASHES / name).glob("*"))}


def close() -> None:
    """Let go of what targets keep between inputs."""
    targets_control.KEY_FILES.close()
    if targets_router.loop.cache_info().currsize:
        targets_router.loop().close()
        targets_router.loop.cache_clear()
