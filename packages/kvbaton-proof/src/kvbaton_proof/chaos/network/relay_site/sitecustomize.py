"""In every Python process of a relay's network: what is dialled at another member goes through the relay.

Laws: only connections to the other members' addresses are turned, in this process and its children, and nothing is
changed in a process that has no `KVBATON_CHAOS_RELAY`. uvloop, which dials in C, is replaced by asyncio's own loop.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from typing import Any

MEMBER = "KVBATON_CHAOS_RELAY"
DOOR_S_MAX = 10.0
_ENDPOINT = re.compile(r"tcp://([0-9.]+):([0-9]+)")


class Dialling:
    """Where to dial instead; asks the relay once for each place."""

    def __init__(self, member: str) -> None:
        self._door, self._network, self._name, self._own = member.split(" ")
        self._known: dict[tuple[str, int], tuple[str, int]] = {}

    def turned(self, address: Any) -> Any:
        if not (isinstance(address, tuple) and len(address) == 2 and isinstance(address[0], str)):
            return address
        host, port = address
        if not host.startswith(self._network) or host == self._own or host.endswith(".254"):
            return address
        if (host, port) not in self._known:
            self._known[host, port] = self._ask(host, port)
        return self._known[host, port]

    def turned_endpoint(self, endpoint: Any) -> Any:
        text = endpoint.decode() if isinstance(endpoint, bytes) else endpoint
        match = _ENDPOINT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return endpoint
        host, port = self.turned((match[1], int(match[2])))
        return f"tcp://{host}:{port}"

    def _ask(self, host: str, port: int) -> tuple[str, int]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DOOR_S_MAX)
            sock.connect("\0" + self._door)
            sock.sendall(json.dumps({"source": self._name, "host": host, "port": port}).encode() + b"\n")
            with sock.makefile("rb") as answer:
                there = json.loads(answer.readline() or b"{}")
        if "port" not in there:
            raise ConnectionRefusedError(f"the relay has no way to {host}:{port}: {there.get('error', 'it is gone')}")
        return there["host"], there["port"]


def install(dialling: Dialling) -> None:
    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, _with_turned(getattr(socket.socket, name), dialling.turned))

    def change_zmq(zmq: Any) -> None:
        for name in ("connect", "disconnect"):
            setattr(zmq.Socket, name, _with_turned(getattr(zmq.Socket, name), dialling.turned_endpoint))

    sys.meta_path.insert(0, Changes({"zmq": change_zmq, "uvloop": _change_uvloop}))


class Changes(importlib.abc.MetaPathFinder):
    """Changes a module right after it was imported, so that a process that does not need it does not pay for it."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        change = self._changes.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        run: Any = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _change_uvloop(uvloop: Any) -> None:
    import asyncio

    def run(main: Any, **_: Any) -> Any:
        return asyncio.run(main)

    uvloop.run = run
    uvloop.install = lambda: None
    uvloop.new_event_loop = asyncio.new_event_loop
    uvloop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy


def _with_turned(call: Callable[..., Any], turned: Callable[[Any], Any]) -> Callable[..., Any]:
    def turned_call(self: Any, address: Any) -> Any:
        return call(self, turned(address))

    return turned_call


def _next_sitecustomize() -> None:
    """The one that this one stands before, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    me, path = sys.modules.pop("sitecustomize", None), list(sys.path)
    sys.path[:] = [entry for entry in path if os.path.abspath(entry or ".") != here]
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if me is not None:
            sys.modules["sitecustomize"] = me
    finally:
        sys.path[:] = [entry for entry in path if entry in sys.path or os.path.abspath(entry or ".") == here]


if __name__ == "sitecustomize":
    _next_sitecustomize()
    if MEMBER in os.environ:
        install(Dialling(os.environ[MEMBER]))
