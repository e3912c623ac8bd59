"""`BatonConnector` on whose data planes a byte of every copy goes wrong while a file is there, and nothing says so.

For `kv_connector_module_path` of a D: vLLM imports this module in the processes that have the connector. Which file:
`KVBATON_TEST_CORRUPT_WHILE`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.engines.vllm.connector import BatonConnector
from kvbaton.testing.transport_harness import CorruptingTransport, some_byte
from kvbaton.transports import catalogue
from kvbaton.transports.core.transport import Copy, HostTransport

__all__ = ["BatonConnector"]

WHILE_ENV = "KVBATON_TEST_CORRUPT_WHILE"


def damaged(make: Callable[..., HostTransport], strike: Callable[[Copy], int | None], *told: Any) -> HostTransport:
    return CorruptingTransport(make(*told), strike)


def corrupt(while_there: Path) -> None:
    any_byte = some_byte(7)

    def strike(copy: Copy) -> int | None:
        return any_byte(copy) if while_there.exists() else None

    for name, plane in catalogue.PLANES.items():
        if plane.make is not None:
            catalogue.PLANES[name] = msgspec.structs.replace(plane, make=partial(damaged, plane.make, strike))


corrupt(Path(os.environ[WHILE_ENV]))
