"""A worker on whose data planes some copies go wrong by one byte, and say nothing of it. Run it as a script.

`python corrupting_worker.py ONE_IN worker …` is `kvbaton worker …` in a process where one copy in `ONE_IN` is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvbaton.cli.main import main
from kvbaton.testing.transport_harness import CorruptingTransport, some_byte
from kvbaton.transports import catalogue
from kvbaton.transports.core.transport import HostTransport


def corrupt(one_in: int) -> None:
    strike = some_byte(7, one_in)

    def damaged(make: Callable[..., HostTransport], *told: Any) -> HostTransport:
        return CorruptingTransport(make(*told), strike)

    for name, plane in catalogue.PLANES.items():
        if plane.make is not None:
            catalogue.PLANES[name] = msgspec.structs.replace(plane, make=partial(damaged, plane.make))


if __name__ == "__main__":
    corrupt(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
