"""A worker on whose data planes some copies go wrong by one byte, and say nothing of it. Run it as a script.

`python corrupting_worker.py ONE_IN worker …` is `kvbaton worker …` in a process where one copy in `ONE_IN` is damaged.
"""

from __future__ import annotations

import sys

from kvbaton.cli.main import main
from kvbaton.proof.contracts.corrupting import CorruptingTransport, some_byte
from kvbaton.protocol.ids import PeerId
from kvbaton.transports import catalogue
from kvbaton.transports.core.transport import HostTransport


def corrupt(one_in: int) -> None:
    plain, strike = catalogue._plain, some_byte(7, one_in)

    def damaged(name: str, me: PeerId, settings: catalogue.PlaneSettings) -> HostTransport:
        return CorruptingTransport(plain(name, me, settings), strike)

    catalogue._plain = damaged


if __name__ == "__main__":
    corrupt(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
