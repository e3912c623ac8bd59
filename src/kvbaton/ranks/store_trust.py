"""Whose values an engine's ranks believe, and what they sign theirs with: made of the engine's keys by its node.

Laws: a signing key crosses only the encrypted link to a rank of the same engine. Only members that may grant are
writers, so what an engine without that right puts is worth nothing, and it puts nothing. Engines without keys, which
share a Mooncake store and nothing else, believe each other, and so whoever else reaches that store.

The address of a shared store as an operator writes it, and how to open it.

    tcp://host:port                                   a `kvbaton store` process
    mooncake://host:port?lend=256MiB&host=10.0.0.1    a `mooncake_master`; also metadata=, protocol=, devices=

Laws: an address is checked where it enters, and the error names the field. Opening a store connects to nothing: a store
that is not running costs misses and counted errors.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta

from kvbaton.control.addressing import ControlError, check_authority, check_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.control.signing import SIGNING_KEY_BYTES, Signer, verify
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.machines.context import mark_of, marked
from kvbaton.store.interface import Backend
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.store.tcp_backend import InvitationClient, LinedBackend
from kvbaton.store.value_header import WRITER_BYTES, StoreTrust, writer_id

if TYPE_CHECKING:
    from kvbaton.node.cluster_node import ClusterNode
    from kvbaton.ranks.engine_store import EngineStore


STORE_NAME = "store"
"""The identity of `kvbaton store` in a key directory, unless another is given."""
LEND_BYTES = 256 << 20
EXPECTED = "tcp://host:port of a kvbaton store, or mooncake://host:port of a mooncake_master"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,15})(|KiB|MiB|GiB|TiB)")
_WORDS = {"host": "host", "protocol": "protocol", "devices": "devices", "metadata": "metadata"}


class Served(msgspec.Struct, frozen=True):
    """A `kvbaton store` process."""

    endpoint: str


class Mooncake(msgspec.Struct, frozen=True):
    """A `mooncake_master` and the memory that this engine lends to it."""

    settings: MooncakeSettings


StorePlace: TypeAlias = Served | Mooncake


def bytes_of(text: str) -> int:
    """A size, such as 4GiB; ValueError says what is wrong."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a size; give bytes, or a number with KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[match[2]]


def store_place(text: str) -> StorePlace:
    """Parses an operator's address; ValueError says what is wrong."""
    parts = urlsplit(text)
    if parts.scheme == "tcp":
        return Served(check_endpoint(text, names=True))
    if parts.scheme != "mooncake" or parts.path or parts.fragment:
        raise ValueError(f"{text[:80]!r} is not {EXPECTED}")
    words: dict[str, str | int] = {"segment_bytes": LEND_BYTES}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "lend":
            words["segment_bytes"] = bytes_of(value)
        elif name in _WORDS:
            words[_WORDS[name]] = value
        else:
            raise ValueError(f"{name[:40]!r} is not one of lend, {', '.join(_WORDS)}")
    return Mooncake(MooncakeSettings(master=check_authority(parts.netloc), **words))  # type: ignore[arg-type]


def opener(
    place: StorePlace, keyring: Keyring, *, ranks: int = 1, server: str = STORE_NAME, timeout_s: float = 4.0
) -> tuple[Callable[[], Backend], bool]:
    """A factory of a rank's backend, and whether each rank of this process owns its own; otherwise they share one.

    Memory is lent by all ranks together.
    """
    match place:
        case Served(endpoint):
            if WorkerId(server) not in keyring.peers:
                raise ControlError(f"store: no key of {server!r}; mint one: kvbaton keys add DIR {server}")
            return lambda: _served(endpoint, keyring, WorkerId(server), timeout_s), False
        case Mooncake(settings):
            lent = msgspec.structs.replace(settings, segment_bytes=settings.segment_bytes // ranks)
            return lambda: MooncakeBackend(lent), True


def _served(endpoint: str, keyring: Keyring, server: WorkerId, timeout_s: float) -> LinedBackend:
    control = ZmqControl(keyring, None)
    control.set_directory({server: (endpoint, "")})  # with the key that it has by then
    host = urlsplit(endpoint).hostname or ""
    return LinedBackend(InvitationClient(control, server), host, timeout_s=timeout_s)


CONTEXT = "store value"
WRITERS_MAX = 16_384

_Id = Annotated[bytes, Meta(min_length=WRITER_BYTES, max_length=WRITER_BYTES)]
_Key = Annotated[bytes, Meta(min_length=SIGNING_KEY_BYTES, max_length=SIGNING_KEY_BYTES)]


class RankStoreTrust(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Who writes as whom; also a message to a rank."""

    me: _Id
    private: Annotated[bytes, Meta(max_length=SIGNING_KEY_BYTES)]  # b"": it may not write
    writers: Annotated[dict[_Id, tuple[_Key, ...]], Meta(max_length=WRITERS_MAX)]
    gone: Annotated[tuple[_Id, ...], Meta(max_length=WRITERS_MAX)] = ()

    @property
    def trust(self) -> StoreTrust:
        sign = partial(Signer.from_private(self.private).sign, CONTEXT) if self.private else None
        return StoreTrust(self.me, sign, self.writers, _check, frozenset(self.gone))

    def __repr__(self) -> str:
        return f"RankStoreTrust(writers={len(self.writers)})"


def _check(key: bytes, payload: bytes, signature: bytes) -> bool:
    return verify(CONTEXT, key, payload, signature)


def trust_of(keyring: Keyring) -> RankStoreTrust:
    if not keyring.admission and not keyring.peers.keys() - {keyring.name}:
        return _unkeyed()
    writers: dict[bytes, tuple[bytes, ...]] = {}
    for name in keyring.peers:
        if may(keyring.role_of(name), Act.GRANT):
            for key in (keyring.peers[name], *keyring.also.get(name, ())):
                writers[writer_id(f"{name} {key}")] = keyring.signing_keys(name)
    private = keyring.signer.private if may(keyring.role_of(keyring.name), Act.GRANT) else b""
    gone = tuple(sorted(map(mark_of, keyring.removed_names)))
    return RankStoreTrust(writer_id(f"{keyring.name} {keyring.public}"), private, writers, gone[:WRITERS_MAX])


@functools.cache
def _unkeyed() -> RankStoreTrust:
    """Of engines that share a store and have no keys: all of them are one writer, and its signature proves nothing but
    that the bytes are whole. There is no member to tell from another, and none to remove."""
    signer = Signer.from_private(bytes(SIGNING_KEY_BYTES))
    me = writer_id("")
    return RankStoreTrust(me, signer.private, {me: (signer.public,)})


def bind_store(store: EngineStore, node: ClusterNode) -> None:
    """The store believes whom the node's keys name, from now on; the node knows from whom values came."""
    writers = _Writers(node.keyring)

    def taken(named: tuple[bytes, ...]) -> bool:
        keyring = node.keyring
        origins = taken_from(keyring, named)
        if writers.have_gone(named, keyring) or any(map(keyring.is_gone, origins)):
            return False
        me = keyring.origin_of(keyring.name)
        node.ledger.desk.origins.note(origin for origin in origins if origin != me)
        return True

    def renewed(keyring: Keyring) -> None:
        writers.take(keyring)
        store.set_trust(trust_of(keyring))

    store.provenance.on_taken = taken
    store.set_trust(trust_of(node.keyring))
    node.on_keys.append(renewed)


class _Writers:
    """Writers who are believed no more. A rank may have checked a value while its writer still was, and its report may
    come after the removal: by then no key says whose that value is."""

    def __init__(self, keyring: Keyring) -> None:
        self._lock = threading.Lock()  # keys come on the node's thread, reports on the engine's
        self._keyring, self._believed = keyring, trust_of(keyring).writers
        self._gone: dict[bytes, None] = {}

    def take(self, keyring: Keyring) -> None:
        """Every change of keys, in order: who came and went between two reports has written, too."""
        with self._lock:
            if keyring is self._keyring:
                return
            believed = trust_of(keyring).writers
            gone = [each for each in (*self._gone, *self._believed) if each not in believed]
            self._keyring, self._believed, self._gone = keyring, believed, dict.fromkeys(gone[-WRITERS_MAX:])

    def have_gone(self, named: Sequence[bytes], keyring: Keyring) -> bool:
        """Whether one of these is among them by now."""
        self.take(keyring)
        return not self._gone.keys().isdisjoint(named)


def taken_from(keyring: Keyring, writers: Sequence[bytes]) -> list[str]:
    """From whom values came, as origins: writers by their keys, others by name where they are known."""
    known: dict[bytes, str] = {}
    for name in keyring.peers:
        known[mark_of(name)] = keyring.origin_of(name)
        for key in (keyring.peers[name], *keyring.also.get(name, ())):
            known[writer_id(f"{name} {key}")] = f"{name} {key}"
    return [known.get(each) or marked(each) for each in writers]
