"""A registry with its join door over real sockets, and members that join there; all closed at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from kvbaton.control import keyring
from kvbaton.control.joining import admission_files as book
from kvbaton.control.joining import join_messages as m
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_client import LIMITS, JoinedMember, JoinWish
from kvbaton.control.joining.join_door import JoinDoor
from kvbaton.control.joining.join_token import LIFE_S, JoinToken, proof
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import RegistryServer, RegistrySettings
from kvbaton.control.sockets import SocketPlane
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Role

CALM = RegistrySettings(ping_s=0.05, suspect_s=30.0, evict_s=60.0, settle_s=0.1)


class Wall:
    """A wall clock that a test can turn on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Gatehouse:
    """One registry and its door."""

    def __init__(
        self,
        directory: Path,
        *,
        life_s: float = LIFE_S,
        settle_s: float = CALM.settle_s,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.directory = directory
        self.keyring = keyring.load(directory, "router")
        self.admission = Admission(self.keyring, life_s=life_s, **({"wall": wall} if wall else {}))
        settings = msgspec.structs.replace(CALM, settle_s=settle_s)
        self.registry = RegistryServer(self.keyring, settings=settings, admission=self.admission)
        self.door = JoinDoor(self.admission, "tcp://127.0.0.1:0", self.registry)
        self.registry.start()
        self.door.start()

    def close(self) -> None:
        self.door.close()
        self.registry.close()

    def token(self, role: Role = Role.BOTH, expires_s: float = 600.0, uses: int = 0) -> JoinToken:
        return book.new_token(self.directory, role, expires_s, uses)

    def uses(self, token: JoinToken) -> int:
        kept = book.token_file(self.directory, token.id)
        assert kept is not None
        return kept.uses

    def wish(self, token: JoinToken, name: str, role: Role = Role.BOTH) -> JoinWish:
        return JoinWish(name, role, token, (self.door.endpoint,))

    def join(self, token: JoinToken, name: str, role: Role = Role.BOTH, deadline_s: float = 20.0) -> JoinedMember:
        return JoinedMember.join(self.wish(token, name, role), deadline_s)


@contextlib.contextmanager
def gatehouse(directory: Path, **more: float | Callable[[], float]) -> Iterator[Gatehouse]:
    """In a directory that is made, with an admission key, if there is none."""
    if not directory.exists():
        keyring.mint(directory, ["router", "operator", "p0"])
        book.new_token(directory, Role.BOTH, 600.0, 1)
    house = Gatehouse(directory, **more)  # type: ignore[arg-type]
    try:
        yield house
    finally:
        house.close()


class Knocker:
    """A key at the door, which can say anything."""

    def __init__(self, house: Gatehouse, keys: tuple[str, str] | None = None) -> None:
        public, secret = keys or tuple(key.decode() for key in zmq.curve_keypair())  # type: ignore[misc]
        self.public = public
        self._plane = SocketPlane(Keyring(WorkerId("x"), public, secret, {}, ()), LIMITS)
        self.socket = self._plane.client(house.admission.door_public, ipv6=False)
        self.socket.connect(house.door.endpoint)

    def ask(self, question: m.Question | bytes, wait_s: float = 10.0) -> m.Answer | None:
        self.socket.send(question if isinstance(question, bytes) else m.encode(question))
        return m.decode_answer(self.socket.recv()) if self.socket.poll(int(wait_s * 1000)) else None

    def join(self, token: JoinToken, name: str, role: Role = Role.BOTH) -> m.Answer | None:
        return self.ask(m.Join(token.id, name, role, proof(token.key, self.public, name, role)))

    def close(self) -> None:
        self.socket.close(linger=0)
        self._plane.context.term()

    def __enter__(self) -> Knocker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
