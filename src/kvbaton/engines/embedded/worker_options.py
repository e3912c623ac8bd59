"""The options of a worker process: one frozen value, checked once, handed down.

Law: a bad value is refused here, by the name of its field, before any port is opened or key is read.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from kvbaton.api.tokens import is_loopback
from kvbaton.control.addressing import check_authority, own_address, registry_places
from kvbaton.control.joining.join_client import AUTO, NEEDED, Credentials
from kvbaton.control.joining.join_token import TOKEN_ENV
from kvbaton.control.plain.announcer import FORGET_S
from kvbaton.node.pin_budget import PIN_SHARE, PIN_WAIT_S
from kvbaton.node.turn_keeping import TurnSettings
from kvbaton.observe.tracing.export import traces_url
from kvbaton.protocol import legality
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, is_worker_id
from kvbaton.protocol.numbers import DURATION_S_MIN, TERM_S_MAX
from kvbaton.protocol.settings import LEASE_S_MIN
from kvbaton.ranks.store_trust import store_place
from kvbaton.security.sealing import ENCRYPT, Encrypt
from kvbaton.transports import catalogue
from kvbaton.transports.catalogue import CHECKSUMS, ChecksumMode

Role = Literal["prefill", "decode", "both"]
Policy = Literal["recompute", "fail"]
HttpAccess = Literal["auto", "keys", "open"]
ModeName = Literal["pull", "stream", "push"]
Dialect = Literal["moriio-read", "moriio-write", "p2p-nccl"]

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
POLICIES: tuple[Policy, ...] = ("recompute", "fail")
HTTP_ACCESS: tuple[HttpAccess, ...] = ("auto", "keys", "open")
MODES: tuple[ModeName, ...] = ("pull", "stream", "push")
DIALECTS: Mapping[Dialect, ModeName] = {"moriio-read": "pull", "moriio-write": "push", "p2p-nccl": "pull"}
"""How other systems' routers find workers, and the mode in which such a router has KV handed over."""

PORT_MAX = 65535
TP_MAX = 64
BLOCKS_MAX = 1 << 20
_SECONDS = (
    "lease_s", "transfer_timeout", "defer_timeout", "claim_timeout", "drain_s", "store_timeout", "pin_wait_s",
)  # fmt: skip
STORE_TIMEOUT_S_MAX = 6.0  # five times this is what a store may be asked for at most


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Ports of 0 take a free one; the registry learns which."""

    name: str
    role: Role
    keys: str = ""  # directory that `kvbaton keys new` made; "": it joins with a token
    registry: str  # tcp://host:port of the router's or a registry of its own; several: a@tcp://…,b@tcp://…
    join_token_file: str = ""  # holds the token that it joins with; or KVBATON_JOIN_TOKEN does
    join_at: str = ""  # endpoint of the join door, if not the registry's next port
    registry_name: str = "router"  # the identity in the key directory of registries that are given without a name
    http_host: str = "127.0.0.1"
    http_port: int = 0
    http_access: HttpAccess = "auto"  # who may send requests: on loopback all, elsewhere only the router; or all
    control_host: str = "127.0.0.1"
    control_port: int = 0
    announce_to: str = ""  # host:port of another system's router; in plain text, so opt-in
    announce_as: Dialect = "moriio-read"
    transport: str = "auto"  # or data planes with commas, best first: `transports.planes`
    checksum: ChecksumMode = "off"  # of what is copied, end to end
    encrypt: Encrypt = "auto"  # what crosses TCP, unless both ends are loopback addresses
    require_enforcement: bool = False  # only transports that confine a peer to the memory lent to it
    modes: tuple[ModeName, ...] = MODES
    tp: int = 1
    policy: Policy = "recompute"
    lease_s: float = 15.0
    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    claim_timeout: float = 10.0
    drain_s: float = 30.0  # at shutdown: finish requests in flight, for at most this long
    blocks: int = 1024
    block_tokens: int = 16
    max_num_seqs: int = 32
    waiting_max: int = 1024
    pin_share: float = PIN_SHARE  # of P's cache, that handoffs may pin; 1: no limit
    pin_wait_s: float = PIN_WAIT_S  # how long a request waits for room to pin before it is refused
    seed: int = 7  # of the model's weights; P and D must agree
    store: str = ""  # of a shared store, if any: `runtime.store_places`
    store_name: str = "store"  # of a kvbaton store, in the key directory
    store_timeout: float = 2.0  # of a look-up; a get may take five times as long
    copies_percent: float = 0.0  # of its blocks, on their way to the store at once as copies of answers; 0: none
    turn_s: float = 0.0  # how long a D keeps an ended request's KV for the next turn; 0: not at all
    turn_percent: float = 25.0  # of its cache, at most, for that
    otlp_endpoint: str = ""  # of a collector, to which spans of traced handoffs are sent
    flight_dir: str = ""  # where records of failed handoffs are written; what a signal asks for goes there too

    def __post_init__(self) -> None:
        for field in ("name", "registry_name", "store_name"):
            if not is_worker_id(getattr(self, field)):
                expected = f"letters, digits, '.', '_', '-', at most {WORKER_ID_CHARS_MAX}"
                raise _bad(field, getattr(self, field), expected)
        if not (self.keys or self.join_token_file or os.environ.get(TOKEN_ENV)):
            raise _bad("keys", self.keys, NEEDED)
        self._check_choices()
        if self.control_host != AUTO and not _is_address(self.control_host):  # transports listen there too
            raise _bad("control_host", self.control_host, f"an address of this host, as numbers, or {AUTO}")
        if self.announce_to:
            self._check_announcement()
        for field in ("http_port", "control_port"):
            self._check_range(field, 0, PORT_MAX)
        if not 0 < self.pin_share <= 1:  # false for NaN as well
            raise _bad("pin_share", self.pin_share, "a share of the cache, above 0 and at most 1")
        for field in _SECONDS:
            value = getattr(self, field)
            least = LEASE_S_MIN if field == "lease_s" else DURATION_S_MIN
            if not least <= value <= TERM_S_MAX:  # false for NaN as well
                raise _bad(field, value, f"seconds, {least:g} to {TERM_S_MAX:g}")
        self._check_range("tp", 1, TP_MAX)
        self._check_range("blocks", 2, BLOCKS_MAX)
        self._check_range("block_tokens", 1, 4096)
        self._check_range("max_num_seqs", 1, 4096)
        self._check_range("waiting_max", 1, 1 << 20)
        self._check_range("seed", 0, (1 << 32) - 1)
        self.turns  # noqa: B018 - checks both

    @property
    def turns(self) -> TurnSettings:
        return TurnSettings(self.turn_s, self.turn_percent)

    @property
    def http_is_guarded(self) -> bool:
        """Whether HTTP requests must prove that they come from the cluster's router."""
        return self.http_access == "keys" or (self.http_access == "auto" and not is_loopback(self.http_host))

    @property
    def credentials(self) -> Credentials:
        return Credentials(
            name=self.name, role=legality.Role(self.role), keys=self.keys, registry=self.registry,
            join_at=self.join_at, join_token_file=self.join_token_file,
        )  # fmt: skip

    def settled(self, name: str) -> WorkerOptions:
        """The same, under the name that it has, and with addresses for `auto`."""
        first = self.registry.partition(",")[0].rpartition("@")[2]
        found = {
            field: own_address(field, first) for field in ("control_host", "http_host") if getattr(self, field) == AUTO
        }
        return msgspec.structs.replace(self, name=name, **found)

    def _check_choices(self) -> None:
        chosen: tuple[tuple[str, Collection[str]], ...] = (
            ("role", ROLES), ("checksum", CHECKSUMS), ("encrypt", ENCRYPT), ("policy", POLICIES),
            ("announce_as", DIALECTS), ("http_access", HTTP_ACCESS),
        )  # fmt: skip
        for field, choices in chosen:
            if getattr(self, field) not in choices:
                raise _bad(field, getattr(self, field), f"one of {', '.join(choices)}")
        try:
            catalogue.parse(self.transport)
        except ValueError as error:
            raise ValueError(f"transport: {error}") from None
        if not self.modes or any(mode not in MODES for mode in self.modes):
            raise _bad("modes", ",".join(self.modes), f"some of {', '.join(MODES)}")
        if self.store_timeout > STORE_TIMEOUT_S_MAX:
            raise _bad("store_timeout", self.store_timeout, f"at most {STORE_TIMEOUT_S_MAX} s")
        if not 0 <= self.copies_percent <= (100 if self.store else 0):  # false for NaN as well
            raise _bad(
                "copies_percent", self.copies_percent, "percent of the engine's blocks, 0 to 100; above 0 with a store"
            )
        try:
            if self.store:
                store_place(self.store)
        except ValueError as error:
            raise ValueError(f"store: {error}") from None
        try:
            if self.otlp_endpoint:
                traces_url(self.otlp_endpoint)
        except ValueError as error:
            raise ValueError(f"otlp_endpoint: {error}") from None
        try:
            registry_places(self.registry, self.registry_name)
        except ValueError as error:
            raise _bad("registry", self.registry, f"an endpoint such as tcp://127.0.0.1:7700; {error}") from None

    def _check_announcement(self) -> None:
        try:
            check_authority(self.announce_to)
        except ValueError:
            raise _bad("announce_to", self.announce_to, "host:port of a router's discovery address") from None
        if self.http_is_guarded:
            expected = "open: another system's router has no token; restrict access by other means"
            raise _bad("http_access", self.http_access, expected)
        if self.role == "both":
            raise _bad("role", self.role, "prefill or decode: another system's router knows only these")
        if self.drain_s < 2 * FORGET_S:
            expected = f"{2 * FORGET_S} or more: a router that hears announcements sends requests after the last one"
            raise _bad("drain_s", self.drain_s, expected)
        if DIALECTS[self.announce_as] not in self.modes:
            raise _bad("modes", ",".join(self.modes), f"{DIALECTS[self.announce_as]}, which {self.announce_as} needs")

    def _check_range(self, field: str, low: int, high: int) -> None:
        value = getattr(self, field)
        if not low <= value <= high:
            raise _bad(field, value, f"{low} to {high}")


def _bad(field: str, got: object, expected: str) -> ValueError:
    return ValueError(f"{field}: got {got!r}, expected {expected}")


def argv_of(options: WorkerOptions) -> list[str]:
    """The flags that say `options`, without those that say a default."""
    argv = []
    for field in msgspec.structs.fields(WorkerOptions):
        value = getattr(options, field.name)
        if field.required or value != field.default:
            argv.append(flag_of(field.name))
            if value is not True:
                argv.append(",".join(value) if field.name == "modes" else str(value))
    return argv


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
