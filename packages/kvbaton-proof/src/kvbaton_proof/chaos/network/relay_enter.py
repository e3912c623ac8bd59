"""Become a member of a relay's network: say so to the relay, then be the command, which dials through it.

Run as a script, by path and without site-packages, as `enter` is.

Law: the process that was started becomes the command: same pid, same descriptors, same working directory.

    python -I -S relay_enter.py DOOR NETWORK NAME ADDRESS SITE COMMAND...
"""

from __future__ import annotations

import os
import socket
import sys

MEMBER = "KVBATON_CHAOS_RELAY"  # in a member's environment: door, network, name and address
DOOR_S_MAX = 10.0


def main(argv: list[str]) -> int:
    door, network, name, address, site, *command = argv
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DOOR_S_MAX)
            sock.connect("\0" + door)
            sock.sendall(f'{{"pid": {os.getpid()}}}\n'.encode())
            if not sock.recv(1):
                raise ConnectionError("the network was closed meanwhile")
        paths = [site, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        os.environ[MEMBER] = " ".join((door, network, name, address))
        os.execvp(command[0], command)
    except OSError as error:
        print(f"relay: {command[0]} was not started as {name}: {error}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
