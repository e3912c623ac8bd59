"""Keeps what production code tells operators out of a simulation, which breaks things on purpose by the thousand."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    logger = logging.getLogger("kvbaton")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
