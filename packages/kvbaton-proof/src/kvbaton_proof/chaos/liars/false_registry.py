"""A registry of the product that works as it should, but for one lie in each list and answer that it sends.

`python -m kvbaton_proof.chaos.liars.false_registry KEYS NAME HOST PORT` reads one line after the other from stdin: the
name of the lie that it tells from now on, and where a thief listens (host:port). An empty line: the truth.

Laws: it holds the key of a registry and no other. What it says is put together from what workers told it, field by
field and without the product's types: a lie need not be a message that those allow. Beside what it changed it leaves
what the worker had signed, or nothing signed, or it signs that by its own key (`SEALS`).
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from kvbaton.control import keyring as keys
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry.registry_server import RegistryServer
from kvbaton.processes import process_logs
from kvbaton.protocol.ids import WorkerId

GHOST = "ghost"
"""A worker of whom nobody has a key."""
_LISTS = ("roster", "directory")
SEALS = ("worker's", "none", "own")
"""What is signed beside a lie: the worker's true words, nothing, or the lie, by the registry's own key."""
_STATEMENT, _ORDER = "registration 1", "drain order 1"
_encode = msgspec.msgpack.Encoder().encode
Body = dict[str, Any]
Bend = Callable[["FalseRegistry", Body], list[Body]]


class FalseRegistry(RegistryServer):
    """`lie` may be set from any thread; see `LIES`."""

    def __init__(self, keyring: Keyring, bind: str, thief: str = "", **more: Any) -> None:
        self.lie = ""
        self.seal = ""  # of `SEALS`; "": any
        self.thief = thief  # host:port
        self._ring = keyring
        self._is_news = False
        self.told: dict[str, int] = {}  # lists that were false, by the lie
        self.first: dict[str, Body] = {}  # of each worker the first entry that it had here, by kind of list
        super().__init__(keyring, bind, **more)

    def tell(self, lie: str, thief: str = "", seal: str = "") -> None:
        """From now on, to everybody: who has the newest list is sent another one."""
        self.thief = thief or self.thief
        self.lie, self.seal = lie, seal
        self._is_news = True
        self._control.wake()

    def signed(self, context: str, said: Body) -> list[bytes]:
        """By its own key, which is no worker's and no operator's."""
        payload = _encode(said)
        return [payload, self._ring.signer.sign(context, payload)]

    def order(self, worker: str, life: int) -> list[bytes] | None:
        """To drain, as if it were an operator."""
        if (self.seal or secrets.choice(SEALS)) != "own":
            return None
        operator = secrets.choice((self._ring.name, "operator"))
        said = {"operator": operator, "key": self._ring.public, "worker": worker, "incarnation": life}
        return self.signed(_ORDER, said)

    def _turn(self, now: float) -> float:
        if self._is_news:
            self._is_news = False
            self._roster._changed()
        return super()._turn(now)

    def _send(self, worker: WorkerId, frame: bytes) -> None:
        version, body = msgspec.msgpack.decode(frame)
        self._remember(body)
        lie = LIES.get(self.lie)
        bodies = [body] if lie is None else lie(self, body)
        if bodies != [body]:
            self.told[self.lie] = self.told.get(self.lie, 0) + 1
        for each in bodies:
            super()._send(worker, _encode((version, each)))

    def _remember(self, body: Body) -> None:
        for entry in body["entries"] if body["type"] in _LISTS else ():
            self.first.setdefault(f"{body['type']} {worker_of(entry)}", entry)


def worker_of(entry: Body) -> str:
    return str(entry.get("registration", entry)["worker"])


def _changed(registry: FalseRegistry, entry: Body, **fields: Any) -> Body:
    """An entry of either kind of list, with these fields where it has them."""
    inner = entry.get("registration")
    told = {name: value for name, value in fields.items() if inner is not None and name in inner}
    rest = {name: value for name, value in fields.items() if name in entry}
    made = {**entry, **rest, **({"registration": {**inner, **told}} if inner is not None else {})}
    seal = registry.seal or secrets.choice(SEALS)
    if seal == "none":
        return {name: value for name, value in made.items() if name != "signed"}
    if seal == "own" and entry.get("signed"):
        made["signed"] = registry.signed(_STATEMENT, _restated(entry["signed"][0], fields))
    return made


def _restated(said: bytes, fields: Body, **more: Any) -> Body:
    """A worker's statement with other words, and a higher number."""
    statement = msgspec.msgpack.decode(said)
    told = statement["registration"]
    told |= {name: value for name, value in fields.items() if name in told or name == "draining"}
    key = fields.get("public_key", statement["key"])
    return {**statement, "registration": told, "key": key, "sequence": statement["sequence"] + 1000, **more}


def _listed(role: str, body: Body, change: Callable[[Body], Body]) -> list[Body]:
    if body["type"] not in _LISTS:
        return [body]
    entries = [change(each) if each.get("registration", each)["role"] == role else each for each in body["entries"]]
    return [{**body, "entries": entries}]


def _add(registry: FalseRegistry, body: Body) -> list[Body]:
    """A worker that no one knows, of each role, behind the thief's address."""
    if body["type"] not in _LISTS:
        return [body]
    key = zmq.curve_keypair()[0].decode()
    ghosts = []
    for entry in body["entries"]:
        life, name = 1 + secrets.randbits(62), f"{GHOST}-{worker_of(entry)}"
        fields = {"worker": name, "incarnation": life, "http_address": registry.thief, "public_key": key}
        ghosts.append(_changed(registry, entry, **fields))
    return [{**body, "entries": [*body["entries"], *ghosts]}]


def _redirect(registry: FalseRegistry, body: Body) -> list[Body]:
    return _listed("decode", body, lambda entry: _changed(registry, entry, http_address=registry.thief))


def _supersede(registry: FalseRegistry, body: Body) -> list[Body]:
    """A later life of each D, at the thief's."""

    def later(entry: Body) -> Body:
        life, born = 1 + secrets.randbits(62), time.time()
        return _changed(registry, entry, http_address=registry.thief, incarnation=life, born=born)

    return _listed("decode", body, later)


def _leave(registry: FalseRegistry, body: Body) -> list[Body]:
    """All have left, by their own word."""
    if body["type"] not in _LISTS:
        return [body]
    lives = [_life(each) for each in body["entries"]]
    words = [each["signed"][0] for each in body["entries"] if each.get("signed")]
    ended = [registry.signed(_STATEMENT, _restated(said, {}, left=True)) for said in words]
    return [{**body, "entries": [], "complete": True, "left": lives, "gone": lives, "ended": ended}]


def _life(entry: Body) -> list[Any]:
    told = entry.get("registration", entry)
    return [told["worker"], told["incarnation"]]


def _drain(registry: FalseRegistry, body: Body) -> list[Body]:
    """All are draining; and each worker is ordered to."""
    if body["type"] in _LISTS:
        entries = [
            {**_changed(registry, each, draining=True), "order": registry.order(*_life(each))}
            for each in body["entries"]
        ]
        return [{**body, "entries": entries}]
    if body["type"] == "registered":
        lives = [_life(each) for each in registry.first.values() if _life(each)[1] == body["incarnation"]]
        orders = [
            {"type": "drain", "worker": name, "incarnation": life, "order": registry.order(name, life)}
            for name, life in lives[:1]
        ]
        return [{**body, "draining": True}, *orders]
    return [body]


def _replay(registry: FalseRegistry, body: Body) -> list[Body]:
    """The first registration of each worker, instead of its present one."""
    if body["type"] not in _LISTS:
        return [body]
    first = {name: each for name, each in registry.first.items() if name.startswith(body["type"])}
    lives = [_life(each) for each in body["entries"] if each not in first.values()]
    return [{**body, "entries": list(first.values()), "complete": True, "gone": lives}]


def _forget(registry: FalseRegistry, body: Body) -> list[Body]:
    if body["type"] in _LISTS:
        return [{**body, "entries": [], "complete": True}]
    if body["type"] == "registered":
        return [{"type": "unknown", "incarnation": body["incarnation"]}]
    return [body]


def _disown(registry: FalseRegistry, body: Body) -> list[Body]:
    """To each worker: another process has your name."""
    if body["type"] == "registered":
        return [{"type": "superseded", "incarnation": body["incarnation"]}]
    return [body]


def _misdirect(registry: FalseRegistry, body: Body) -> list[Body]:
    """Workers look for each other at the thief's address, under a key that is nobody's."""
    place = f"tcp://{registry.thief}"
    return _listed("prefill", body, lambda entry: _changed(registry, entry, control_endpoint=place))


def _silence(registry: FalseRegistry, body: Body) -> list[Body]:
    return []


LIES: Mapping[str, Bend] = {
    "adds": _add,
    "redirects": _redirect,
    "supersedes": _supersede,
    "says-left": _leave,
    "says-draining": _drain,
    "plays-back": _replay,
    "forgets": _forget,
    "disowns": _disown,
    "misdirects": _misdirect,
    "falls-silent": _silence,
}


def main(directory: str, name: str, host: str, port: str) -> int:
    process_logs.configure(process_logs.LogSettings())
    registry = FalseRegistry(keys.load(directory, name), f"tcp://{host}:{port}")
    with contextlib.closing(registry):
        registry.start()
        print(f"{name} serves {registry.endpoint}", flush=True)
        for line in sys.stdin:
            lie, _, thief = line.strip().partition(" ")
            registry.tell(lie, thief)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
