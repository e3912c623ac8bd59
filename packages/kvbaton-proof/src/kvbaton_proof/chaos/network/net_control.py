"""Messages between a network's process and the conductor: JSON lines over a socket pair.

Laws: every request gets one reply, in order. A line has a bound. The end of the socket is the end of the network.

Ending the processes of a network: all that a test for them finds, and no other.

Law: a process is killed through a descriptor that was opened before it was tested, so never another with its number.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from kvbaton_proof.chaos.network.hub_policy import Count, Wires

WAIT_S_MAX = 2.0


def end_all(ours: Callable[[int], bool | None], spare: Collection[int]) -> list[int]:
    """Kill every process that is `ours` (which may raise OSError for no, or say None: look again), until none is left;
    the pids that stay."""
    deadline = time.monotonic() + WAIT_S_MAX
    while True:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        there = [pid for pid in pids if pid not in spare and _kill_if(pid, ours)]
        if not there or time.monotonic() > deadline:
            return there
        time.sleep(0.01)


def _kill_if(pid: int, ours: Callable[[int], bool | None]) -> bool:
    """Whether to look once more."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        is_ours = ours(pid)
        if not is_ours:
            return is_ours is None
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:  # another user's, or gone (of a zombie nothing can be asked)
        return False
    finally:
        os.close(fd)
    return True


LINE_BYTES_MAX = 1 << 20


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line. `tmpfs`: MiB by path."""

    names: tuple[str, ...]
    seed: int = 0
    tmpfs: dict[str, int] = {}
    own_user: bool = False  # a user namespace even where it is not needed


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its answer. `prefixes`: what stands before the command of a member, by name. With `error` there is no network."""

    error: str = ""
    addresses: dict[str, str] = {}
    prefixes: dict[str, list[str]] = {}
    private: tuple[str, ...] = ()  # paths that only the hosts of this network see


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cut"):
    source: str
    target: str


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="slow"):
    source: str
    target: str
    delay_s: float
    loss: float


class Mend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mend"):
    source: str
    target: str


class Heal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heal"):
    pass


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask"):
    """For the counts."""


Request = Cut | Slow | Mend | Heal | Ask


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: str = ""
    counts: dict[str, Count] = {}  # by source-target


def carry_out(request: Request, wires: Wires, counts: dict[tuple[str, str], Count]) -> Reply:
    try:
        match request:
            case Cut(source, target):
                wires.cut((source, target))
            case Slow(source, target, delay_s, loss):
                wires.slow((source, target), delay_s, loss)
            case Mend(source, target):
                wires.mend((source, target))
            case Heal():
                wires.heal()
            case Ask():
                return Reply(counts={f"{source}-{target}": count for (source, target), count in counts.items()})
    except ValueError as error:
        return Reply(error=str(error))
    return Reply()


def serve(run: Callable[[Lines, Setup, int], int]) -> int:
    """A network's process from its beginning to its end: `run` gets the control, what is wanted, and the conductor's
    pid. An OSError says why there is no such network; an EOFError, that the conductor went away."""
    conductor, control = os.getppid(), Lines(socket.socket(fileno=0))
    try:
        return run(control, msgspec.json.decode(control.read(), type=Setup), conductor)
    except OSError as error:
        control.send(Ready(error=str(error)))
    except EOFError:
        pass
    return 1


class Lines:
    """One end. `read` waits as the socket's timeout says."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        self.sock.sendall(msgspec.json.encode(message) + b"\n")

    def read(self) -> bytes:
        """The next line; EOFError: the other end is gone."""
        while True:
            for line in self._whole():
                return line
            self._fill()

    def ready(self) -> list[bytes]:
        """After the socket was readable: the lines that are whole now."""
        self._fill()
        return list(self._whole())

    def _fill(self) -> None:
        try:
            data = self.sock.recv(65536)
        except ConnectionError:
            data = b""
        if not data or len(self._buffer) > LINE_BYTES_MAX:
            raise EOFError
        self._buffer += data

    def _whole(self) -> Iterator[bytes]:
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            yield line
