"""Networks to do harm on: of namespaces where the machine allows them, of relays elsewhere.

Laws: a network is one process of its own, child of the conductor; it ends with `close`, and with the conductor however
that ends. Every request to it has a deadline. The conductor is host "client".
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import msgspec

from kvbaton_proof.chaos.network.hub_policy import Count
from kvbaton_proof.chaos.network.net_control import Ask, Cut, Heal, Lines, Mend, Ready, Reply, Request, Setup, Slow

CLIENT = "client"
STATE = "KVBATON_CHAOS_NETWORK"  # in the environment of a conductor that became host "client"
KINDS = ("namespaces", "relay")
_MODULES = {"namespaces": "kvbaton_proof.chaos.network.hub", "relay": "kvbaton_proof.chaos.network.relay"}
START_S_MAX = 30.0
REPLY_S_MAX = 10.0
CLOSE_S_MAX = 5.0
HOSTS_MAX = 200
_NAME = re.compile(r"[a-z0-9][a-z0-9_.]{0,31}")  # no dash: it stands between the two names of a link


class NetworkError(RuntimeError):
    """There is no such network, or no longer; the message says why."""


class _State(msgspec.Struct, frozen=True):
    kind: str
    pid: int
    fd: int
    ready: Ready


class Network:
    """Each member is a host of its own with one address; faults are between hosts, and "client" is the conductor.

    May be called from any thread; a call takes about a millisecond.
    """

    def __init__(self, kind: str, pid: int, sock: socket.socket, ready: Ready) -> None:
        self._kind = kind
        self._pid = pid
        self._lines = Lines(sock)
        self._ready = ready
        self._lock = threading.Lock()
        self._closed = False

    @property
    def kind(self) -> str:
        """Namespaces or relay, as the report says it."""
        return self._kind

    @property
    def pid(self) -> int:
        """The network's process."""
        return self._pid

    @property
    def private(self) -> tuple[str, ...]:
        """Paths where the hosts have a small tmpfs of their own, which may be filled to the brim."""
        return self._ready.private

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._ready.addresses)

    def address(self, name: str) -> str:
        """Where `name` binds and is dialled; the same in every life of it."""
        return self._ready.addresses[name]

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """`argv`, so that it runs as host `name`. The process that is started is the member itself: same pid."""
        return [*self._ready.prefixes[name], *argv]

    def cut(self, source: str, target: str) -> None:
        """From now on nothing passes from `source` to `target`; the other way it does."""
        self._ask(Cut(source, target))

    def slow(self, source: str, target: str, delay_s: float, loss: float) -> None:
        """From now on packets of this way are late by `delay_s`, and this share of them is lost."""
        self._ask(Slow(source, target, delay_s, loss))

    def mend(self, source: str, target: str) -> None:
        """This way is good again."""
        self._ask(Mend(source, target))

    def heal(self) -> None:
        """All wires are good again."""
        self._ask(Heal())

    def counts(self) -> dict[str, Count]:
        """What each way has carried and lost, by source-target."""
        return self._ask(Ask()).counts

    def become_client(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Does not return: this process is `argv` from now on, as host "client", and finds the network by `adopt`."""
        fd = self._lines.sock.fileno()
        state = msgspec.json.encode(_State(self._kind, self._pid, fd, self._ready)).decode()
        command = self.command(CLIENT, argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os.set_inheritable(fd, True)
        os.execvpe(command[0], command, {**environ, STATE: state})

    def close(self) -> None:
        """Everything that this network made is gone. Bounded; may be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lines.sock.close()
            _end(self._pid)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Request) -> Reply:
        with self._lock:
            if self._closed:
                raise NetworkError("the network is closed; make another one")
            try:
                self._lines.sock.settimeout(REPLY_S_MAX)
                self._lines.send(request)
                reply = msgspec.json.decode(self._lines.read(), type=Reply)
            except (OSError, EOFError) as error:
                raise NetworkError(f"the network's process {self._pid} does not answer: {error!r}") from None
        if reply.error:
            raise ValueError(reply.error)
        return reply


def available() -> tuple[str, str]:
    """The kind that `make` would give here, and why not a better one ("" for namespaces)."""
    try:
        start("namespaces", (CLIENT,)).close()
    except NetworkError as error:
        return "relay", str(error)
    return "namespaces", ""


def make(
    names: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
    *,
    seed: int = 0,
    tmpfs: Mapping[str, int] | None = None,
) -> Network:
    """A network of "client" and `names`: of namespaces, or else of relays. `tmpfs`: MiB by path (see `private`)."""
    try:
        network = start("namespaces", names, seed, tmpfs)
    except NetworkError as error:
        say(f"no namespaces here ({error}): the members' connections go through a relay instead")
        return start("relay", names, seed, tmpfs)
    say(f"a network of {len(network.names)} hosts, made of namespaces")
    return network


def inside(
    names: Sequence[str],
    argv: Sequence[str],
    environ: MutableMapping[str, str],
    say: Callable[[str], None] = lambda _: None,
    *,
    seed: int = 0,
    tmpfs: Mapping[str, int] | None = None,
) -> Network:
    """A network, with this process as its host "client". For a program's beginning: it may start over as `argv`.

    The first time it makes the network and becomes `argv`, which is this same program with the same pid; the second
    time, known by `environ`, it takes the network over.
    """
    network = adopt(environ)
    if network is None:
        network = make(names, say, seed=seed, tmpfs=tmpfs)
        try:
            network.become_client(argv, environ)
        finally:
            network.close()
    return network


def adopt(environ: MutableMapping[str, str]) -> Network | None:
    """The network whose host "client" this process became; None: it did not."""
    text = environ.pop(STATE, None)
    if text is None:
        return None
    state = msgspec.json.decode(text, type=_State)
    os.set_inheritable(state.fd, False)
    return Network(state.kind, state.pid, socket.socket(fileno=state.fd), state.ready)


def start(
    kind: str,
    names: Sequence[str],
    seed: int = 0,
    tmpfs: Mapping[str, int] | None = None,
    *,
    own_user: bool = False,
) -> Network:
    """A network of that kind and no other; NetworkError says why it cannot be."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"names: {name!r} is not a host's name; use small letters and digits, without a dash")
    hosts = tuple(dict.fromkeys((CLIENT, *names)))
    if len(hosts) > HOSTS_MAX:
        raise ValueError(f"names: {len(hosts)} hosts, at most {HOSTS_MAX} fit in one network")
    ours, theirs = socket.socketpair()
    with theirs:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", _MODULES[kind]],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            ],
            setsid=True,  # a Ctrl-C at the terminal is for the conductor, which then closes us
        )
    try:
        ours.settimeout(START_S_MAX)
        lines = Lines(ours)
        lines.send(Setup(hosts, seed, dict(tmpfs or {}), own_user))
        ready = msgspec.json.decode(lines.read(), type=Ready)
        if ready.error:
            raise NetworkError(ready.error)
    except BaseException as error:
        ours.close()
        _end(pid)
        if isinstance(error, OSError | EOFError | msgspec.MsgspecError):
            raise NetworkError(f"the network's process did not start: {error!r}") from None
        raise
    return Network(kind, pid, ours, ready)


def _end(pid: int) -> None:
    """The child ends by itself, now that its input ended; or is killed."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # somebody else has reaped it
    try:
        waiter = select.poll()
        waiter.register(fd, select.POLLIN)
        if not waiter.poll(CLOSE_S_MAX * 1000):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ChildProcessError, ProcessLookupError):
        pass
    finally:
        os.close(fd)
