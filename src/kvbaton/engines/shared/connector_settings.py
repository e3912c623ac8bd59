"""`kv_connector_extra_config`, checked once and handed down as one frozen value.

Law: a key that nobody knows, or a value that cannot be meant, is refused at start by its name, with what was expected.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvbaton.api.params import Mode
from kvbaton.control.addressing import check_authority, check_endpoint, own_address, registry_places
from kvbaton.control.joining.join_client import AUTO, Credentials
from kvbaton.control.joining.join_token import TOKEN_ENV
from kvbaton.control.keyring import data_parallel_name
from kvbaton.node.pin_budget import PIN_SHARE, PIN_WAIT_S
from kvbaton.node.turn_keeping import TurnSettings
from kvbaton.observe.tracing.export import traces_url
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import WorkerId, is_worker_id
from kvbaton.protocol.legality import Role
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX
from kvbaton.ranks.engine_store import EngineStoreSettings
from kvbaton.ranks.store_trust import STORE_NAME, store_place
from kvbaton.security.sealing import Encrypt
from kvbaton.transports import catalogue
from kvbaton.transports.catalogue import ChecksumChoice
from kvbaton.transports.cuda.cuda_driver import SHARE, check_share

FIELD = "kv_connector_extra_config"
PORT_MAX = 65535
GET_PER_LOOKUP = 5.0  # a load may take this many times as long as a look-up: it moves bytes
PUT_S_MAX = 20.0
_SECONDS = (
    "ticket_ttl_s", "transfer_timeout", "defer_timeout", "claim_timeout", "lease_s", "max_hold_s", "store_timeout",
    "pin_wait_s",
)  # fmt: skip
STORE_TIMEOUT_S_MAX = 6.0  # five times this is what a store may be asked for at most


class Moriio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Announce this engine to a router that speaks MoRI-IO's plain discovery (no authentication: opt-in)."""

    router: str  # host:port
    transfer_mode: Literal["READ", "WRITE"] = "READ"
    interval_s: float = 3.0


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's place in its cluster, and its time-outs. `docs/vllm.md` explains each."""

    name: str = "alone"  # this engine's identity in the key directory; needed, as are the keys, unless it is alone
    keys: str = ""  # the directory that `kvbaton keys new` made; or, to join instead,
    join_token_file: str = ""  # a file that holds a join token; KVBATON_JOIN_TOKEN may hold it too
    join_token: str = ""  # the token itself: vLLM logs its configuration, so a file is better
    join_at: str = ""  # where to join, if not at the registry's next port
    registry: str = ""  # where the list of workers is kept: tcp://host:port; several: a@tcp://…,b@tcp://…
    registry_name: str = "router"  # the identity in the key directory of registries that are given without a name
    peers: dict[str, str] = {}  # instead of a registry: the control endpoint of each peer by name
    http_address: str | None = None  # host:port of this engine's own API; "": it has none, and no router asks it
    control_host: str = "127.0.0.1"
    control_port: int = 0
    mode: Mode = Mode.PULL  # for requests that name none
    modes: tuple[Mode, ...] = tuple(Mode)
    transport: str = "auto"  # or data planes with commas, best first
    checksum: ChecksumChoice = "auto"  # of what is copied, end to end; auto: of GPU memory between hosts, else off
    copy_share: float = SHARE  # of a GPU's multiprocessors, for copies and digests: what they may take from decoding
    encrypt: Encrypt = "auto"  # what crosses TCP: between hosts, always (on) or never (off)
    require_enforcement: bool = False  # only data planes on which a peer reaches nothing but what is lent to it
    layerwise: bool = True  # P announces each layer, not only each chunk
    role: Literal["", "prefill", "decode"] = ""  # of a kv_both: what routers may ask of it, if not both
    model_id: str = ""  # stands for the weights, where their files cannot be sampled
    moriio: Moriio | None = None
    named_pairs: bool = False  # the server around this engine names P and D in place of a ticket; no client can
    store: str = ""  # a shared store: tcp://host:port of a kvbaton store, mooncake://host:port of a mooncake_master
    store_name: str = STORE_NAME  # a kvbaton store's identity in the key directory
    store_timeout: float = 2.0  # of a look-up; a load may take five times as long
    copies_percent: float = 0.0  # of its blocks, on their way to the store at once as copies of answers; 0: none
    pin_share: float = PIN_SHARE  # of P's cache, that handoffs may pin; 1: no limit
    pin_wait_s: float = PIN_WAIT_S  # how long a request waits for room to pin before it is refused
    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    claim_timeout: float = 10.0
    lease_s: float = 15.0
    max_hold_s: float = 180.0
    ticket_ttl_s: float = 120.0
    drain_file: str = ""  # once this file is made, the engine drains as by `kvbaton drain`; one of an earlier life goes
    flight_dir: str = ""  # where records of failed handoffs are written; SIGUSR2 has all of them written there
    otlp_endpoint: str = (
        ""  # http(s):// or grpc(s)://host:port of an OpenTelemetry collector: spans of sampled requests
    )
    turn_s: float = 0.0  # how long D keeps an ended request's KV for the next turn of its conversation; 0: not at all
    turn_percent: float = 25.0  # of its blocks, at most, for that
    fault_copy_delay_s: float = 0.0  # for tests of expiry only: every copy of this engine starts this much later
    fault_misplace_while: str = ""  # for tests of the oracle only: while this file is there, blocks land misplaced

    def __post_init__(self) -> None:
        for field in ("name", "registry_name", "store_name", *(f"peers.{name}" for name in self.peers)):
            text = getattr(self, field, None) or field.removeprefix("peers.")
            if not is_worker_id(text):
                raise _bad(field, text, "letters, digits, '.', '_' and '-'")
        if self.store:
            _checked("store", self.store, store_place)
        alone = _is_alone(self.store, self.registry or self.peers or self.moriio)
        if not self.keys and not self.joins and not alone:
            raise _bad("keys", self.keys, "a directory; make one with: kvbaton keys new DIR router p0 d0")
        _checked("transport", self.transport, catalogue.parse)
        self._check_addresses()
        self._check_numbers()

    def _check_addresses(self) -> None:
        for name, endpoint in self.peers.items():
            _checked(f"peers.{name}", endpoint, lambda text: check_endpoint(text, names=True))
        if self.registry:
            _checked("registry", self.registry, lambda text: registry_places(text, self.registry_name))
        if self.http_address:
            _checked("http_address", self.http_address, check_authority)
        elif self.moriio or (self.registry and self.http_address is None):
            expected = "host:port of this engine's API, so that a router can find it"
            inside = "" if self.moriio else '; or "", of an engine inside another server, that no router asks'
            raise _bad("http_address", self.http_address or "", expected + inside)
        if self.otlp_endpoint:
            _checked("otlp_endpoint", self.otlp_endpoint, traces_url)
        if self.moriio is not None:
            _checked("moriio.router", self.moriio.router, check_authority)
        if self.registry and self.peers:
            raise _bad("peers", sorted(self.peers), "nothing beside a registry, which tells the addresses")

    def _check_numbers(self) -> None:
        if not 0 <= self.control_port <= PORT_MAX:
            raise _bad("control_port", self.control_port, f"0 to {PORT_MAX}")
        if self.mode not in self.modes:
            raise _bad("mode", str(self.mode), f"one of modes, {', '.join(self.modes) or 'of which there are none'}")
        for field in _SECONDS:
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise _bad(field, value, "seconds, above 0")
        if self.ticket_ttl_s > TICKET_LIFE_S_MAX:
            raise _bad("ticket_ttl_s", self.ticket_ttl_s, f"at most {TICKET_LIFE_S_MAX:.0f} s: P refuses older tickets")
        if self.store_timeout > STORE_TIMEOUT_S_MAX:
            raise _bad("store_timeout", self.store_timeout, f"at most {STORE_TIMEOUT_S_MAX} s")
        if not 0 <= self.copies_percent <= (100 if self.store else 0):  # false for NaN as well
            raise _bad(
                "copies_percent", self.copies_percent, "percent of the engine's blocks, 0 to 100; above 0 with a store"
            )
        _checked("copy_share", self.copy_share, check_share)
        if not 0 < self.pin_share <= 1:  # false for NaN as well
            raise _bad("pin_share", self.pin_share, "a share of the cache, above 0 and at most 1")
        if not (math.isfinite(self.fault_copy_delay_s) and self.fault_copy_delay_s >= 0):
            raise _bad("fault_copy_delay_s", self.fault_copy_delay_s, "seconds, 0 or more")
        _checked("turns", None, lambda _: self.turns)
        try:
            self.protocol()
        except ProtocolError as error:
            raise ValueError(f"{FIELD}.{error.detail}") from None

    @property
    def turns(self) -> TurnSettings:
        return TurnSettings(self.turn_s, self.turn_percent)

    @property
    def is_alone(self) -> bool:
        """Nobody speaks with this engine: it has no keys, and shares KV through a store that asks for none."""
        return not self.keys and not self.joins

    @property
    def joins(self) -> bool:
        """Whether this engine becomes a member by a token."""
        return not self.keys and bool(self.join_token_file or self.join_token or os.environ.get(TOKEN_ENV))

    def plays(self, transfer: Any) -> Role:
        """The engine's part, by vLLM's kv_role and these settings."""
        prefills = transfer.is_kv_producer and self.hands_over
        decodes = transfer.is_kv_consumer and self.takes_over
        return Role.BOTH if prefills and decodes else Role.PREFILL if prefills else Role.DECODE

    def credentials(self, role: Role, part: str = "") -> Credentials:
        """Of the engine, or of one of its processes that is a member of its own."""
        return Credentials(
            name=f"{self.name}.{part}" if part else self.name, role=role, keys=self.keys, registry=self.registry,
            join_at=self.join_at, join_token_file=self.join_token_file, join_token=self.join_token,
        )  # fmt: skip

    def settled(self) -> ConnectorSettings:
        """The same with addresses for `auto`; on each host its own."""
        first = self.registry.partition(",")[0].rpartition("@")[2]
        host, _, port = (self.http_address or "").rpartition(":")
        found = {}
        if self.control_host == AUTO:
            found["control_host"] = own_address(f"{FIELD}.control_host", first)
        if host == AUTO:
            address = own_address(f"{FIELD}.http_address", first)
            found["http_address"] = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        return msgspec.structs.replace(self, **found) if found else self

    def __repr__(self) -> str:  # it may hold a token
        return f"ConnectorSettings({self.name!r})"

    @property
    def hands_over(self) -> bool:
        """Whether an engine that computes prompts may compute them for others."""
        return not self.is_alone and self.role != "decode"

    @property
    def takes_over(self) -> bool:
        """Whether an engine that loads may load what others have computed for it."""
        return not self.is_alone and self.role != "prefill"

    def of_rank(self, rank: int) -> ConnectorSettings:
        """Those of one data-parallel rank: a name of its own, and a port where one is given."""
        changes: dict[str, Any] = {"name": data_parallel_name(self.name, rank)}
        if self.control_port:
            changes["control_port"] = self.control_port + rank
        return msgspec.structs.replace(self, **changes)

    def shelf(self) -> EngineStoreSettings:
        """How long the engine waits for its store."""
        return EngineStoreSettings(
            lookup_timeout_s=self.store_timeout,
            get_timeout_s=GET_PER_LOOKUP * self.store_timeout,
            put_timeout_s=min(PUT_S_MAX, self.transfer_timeout),
            copies_percent=self.copies_percent,
        )

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.name)

    def protocol(self) -> Settings:
        """What the ledger needs of these."""
        return Settings(
            transfer_timeout=self.transfer_timeout,
            defer_timeout=self.defer_timeout,
            claim_timeout=self.claim_timeout,
            lease_s=self.lease_s,
            max_hold_s=self.max_hold_s,
        )

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """The settings, or a ValueError that names the key."""
        unknown = [str(key) for key in extra if key not in cls.__struct_fields__]
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise ValueError(f"{FIELD}.{unknown[0]}: nobody knows this key; the keys are {known}")
        joins = any(map(extra.get, ("join_token_file", "join_token"))) or bool(os.environ.get(TOKEN_ENV))
        missing = [field for field in (("name",) if joins else ("name", "keys")) if field not in extra]
        if missing and not _is_alone(str(extra.get("store", "")), any(map(extra.get, ("registry", "peers", "moriio")))):
            raise _bad(missing[0], None, "this engine's name, and the key directory it is in (kvbaton keys new)")
        try:
            return msgspec.convert(dict(extra), cls)
        except msgspec.ValidationError as error:
            text = str(error)
            raise ValueError(text if text.startswith(FIELD) else f"{FIELD}: {text}") from None


def _is_alone(store: str, others: object) -> bool:
    """Whether an engine can do without keys."""
    return store.startswith("mooncake:") and not others


def _checked(field: str, value: object, check: Any) -> None:
    try:
        check(value)
    except ValueError as error:
        raise ValueError(f"{FIELD}.{field}: {error}") from None


def _bad(field: str, got: object, expected: str) -> ValueError:
    return ValueError(f"{FIELD}.{field}: got {got!r}, expected {expected}")
