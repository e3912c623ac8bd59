"""An engine's presence in its cluster: ledger, control plane, links to its ranks, discovery. One per scheduler process.

Laws: it listens only once all ranks have said where their caches lie, and is listed only once its HTTP door answers.
Everything has threads of its own; the scheduler's thread meets it at the `Doorway` alone.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import secrets
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from kvbaton.control.address_book import AddressBook, moriio_address
from kvbaton.control.addressing import ControlError
from kvbaton.control.keyring import Keyring
from kvbaton.control.moriio import FORGET_S, MoriioAnnouncer
from kvbaton.control.moriio import registration as moriio_registration
from kvbaton.control.registry.registry_client import RegistryClient
from kvbaton.control.registry.registry_messages import DirectoryEntry, Registration
from kvbaton.control.zmq import ZmqControl
from kvbaton.engines.vllm.connector_settings import ConnectorSettings
from kvbaton.engines.vllm.server_draining import DrainWatch, ledger_holds
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.key_renewal import renewed_keys
from kvbaton.node.node import Node
from kvbaton.node.node_loop import NodeLoop
from kvbaton.node.observation import Watch, dump_on_signal
from kvbaton.node.ticket_discard import discarded
from kvbaton.observe.tracing.export import SpanExport, of_worker
from kvbaton.protocol.compat import digest as compat_digest
from kvbaton.protocol.events import Departed
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.ids import Incarnation, PeerId, TransferId, WorkerId
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.ranks.engine_store import Shelf
from kvbaton.ranks.rank_link import RankLinks
from kvbaton.ranks.rank_messages import RankInvitation
from kvbaton.transports.core.host_identity import boot_id

log = logging.getLogger(__name__)

HEALTH_POLL_S = 0.25
HEALTH_WAIT_S = 5.0
STOP_S = 3.0

Role = Literal["prefill", "decode", "both"]


class EngineFacts(msgspec.Struct, frozen=True):
    """What is known of an engine once it has its cache."""

    role: Role
    model: str
    blocks: int
    layout: EngineLayout
    compat: dict[str, str]
    exact_epochs: bool
    tp_size: int


class Presence:
    """Everything of an engine that speaks to others."""

    def __init__(
        self, settings: ConnectorSettings, keyring: Keyring, facts: EngineFacts, ranks: Sequence[RankInvitation]
    ) -> None:
        self.settings = settings
        self.facts = facts
        self.peer = PeerId(settings.worker, Incarnation(secrets.randbits(63)))
        self.book = AddressBook()
        host = f"[{settings.control_host}]" if ":" in settings.control_host else settings.control_host
        self.control = ZmqControl(keyring, f"tcp://{host}:{settings.control_port}")
        self.links = RankLinks(ranks, me=self.peer, tell=self.control.wake)
        self.watch = Watch(self.peer, directory=settings.flight_dir, spans=self._spans())
        self.doorway = Doorway(self._door_config(keyring, len(ranks)), EpochTable(facts.blocks))
        self.shelf = self._make_shelf(len(ranks)) if settings.store else None
        self.node = self._make_node(keyring, len(ranks))
        self.watch.begin(self.node, lambda: {"blocks": float(facts.blocks)})
        self.loop = NodeLoop(self.node, self.control)
        self._listings: list[RegistryClient | MoriioAnnouncer] = []
        self._keyring = keyring
        self._closing = threading.Event()
        self._herald = threading.Thread(target=self._be_listed, name="kvbaton-herald", daemon=True)
        self._check_static(keyring)
        self._know({name: (endpoint, "") for name, endpoint in self._static()})  # under whichever key each has by then
        self.on_keys: Callable[[Keyring], None] = lambda _: None
        self.control.on_keys = self._take_keys

    def start(self) -> None:
        self.links.start()
        self.loop.start()
        dump_on_signal(self.watch.dumps)
        if self.settings.registry or self.settings.moriio:
            self._herald.start()
        log.info("kvbaton: %s listens at %s for %s", self.peer, self.control.endpoint, ", ".join(self.transports))

    def stop(self) -> None:
        """Say goodbye; bounded, and not needed for anybody's safety."""
        self._closing.set()
        for listing in self._listings:
            with contextlib.suppress(Exception):
                listing.close() if isinstance(listing, RegistryClient) else listing.stop(STOP_S)
        self.loop.stop(STOP_S)
        self.watch.close()
        if self.shelf is not None:
            self.shelf.close()
        self.links.stop(STOP_S)

    def end_store(self) -> None:
        """Everything that the store was asked for ends now; the doorway and the shelf tell of it. Bounded."""
        if self.shelf is not None:
            with contextlib.suppress(Exception):  # a loop that is stuck: there is nobody left to tell
                self.loop.call(self.shelf.close).result(STOP_S)

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.node.ledger.desk.identity.transports)

    # --- discovery

    def _be_listed(self) -> None:
        """Wait until this engine answers its own clients, then let routers know."""
        if not self._answers():
            return
        settings = self.settings
        try:
            if settings.registry:
                where = (WorkerId(settings.registry_name), settings.registry)
                client = RegistryClient(
                    self._keyring,
                    where,
                    self._registration(),
                    on_directory=self._on_directory,
                    on_departed=self._on_departed,
                    on_drain=self._on_drain,
                    on_discard=self._on_discard,
                    report=self.watch.report,
                    on_show=self.watch.recorder.show,
                )
                self._listings.append(client)
            if settings.moriio is not None:
                self._listings.append(self._moriio())
            for listing in self._listings:
                listing.start()
        except ControlError as error:
            log.error("[not-listed] kvbaton: %s is not listed: %s", self.peer, error)

    def _answers(self) -> bool:
        url = f"http://{self.settings.http_address}/health"
        while not self._closing.wait(HEALTH_POLL_S):
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(url, timeout=HEALTH_WAIT_S) as answer,
            ):
                if answer.status == 200:
                    return True
        return False

    def _registration(self) -> Registration:
        facts = self.facts
        return Registration(
            worker=self.peer.worker,
            incarnation=self.peer.incarnation,
            role=facts.role,
            http_address=self.settings.http_address,
            control_endpoint=self.control.endpoint,
            modes=tuple(self.settings.modes),
            transports=self.transports,
            compat_digest=compat_digest(facts.compat),
            tp_size=facts.tp_size,
            model=facts.model[-256:],
            host=boot_id(),
            stays=True,
        )

    def _moriio(self) -> MoriioAnnouncer:
        asked = self.settings.moriio
        assert asked is not None
        role: Literal["P", "D"] = "P" if self.facts.role == "prefill" else "D"
        message = moriio_registration(
            role,
            self.settings.http_address,
            moriio_address(self.control.endpoint),
            transfer_mode=asked.transfer_mode,
            tp_size=self.facts.tp_size,
        )
        return MoriioAnnouncer(f"tcp://{asked.router}", message, interval_s=asked.interval_s)

    def _on_directory(self, entries: Sequence[DirectoryEntry]) -> None:
        self._know({entry.worker: (entry.control_endpoint, entry.public_key) for entry in entries})

    def _on_departed(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self.loop.tell(Departed(worker, incarnation))

    def _on_discard(self, tickets: Sequence[str]) -> None:
        for event in discarded(self.doorway, tickets):
            self.loop.tell(event)

    def _on_drain(self) -> None:
        """Routers send nobody new from now on. Ending vLLM is its operator's business, who is told when it is idle."""
        log.info("kvbaton: %s drains", self.peer)
        for listing in list(self._listings):
            if isinstance(listing, RegistryClient):
                listing.drain()
                holds = partial(ledger_holds, self.node.ledger)
                forget_s = 0.0 if self.settings.moriio is None else FORGET_S
                DrainWatch(listing, self.settings.http_address, holds, self._closing, forget_s).start()
            else:
                listing.stop(STOP_S)

    def _static(self) -> list[tuple[str, str]]:
        return [*self.settings.peers.items(), (self.settings.name, self.control.endpoint)]

    def _know(self, directory: dict[str, tuple[str, str]]) -> None:
        endpoints = {name: endpoint for name, (endpoint, _) in directory.items()}
        self.book.replace({**endpoints, self.settings.name: self.control.endpoint})  # a registry tells of the others
        others = {WorkerId(name): address for name, address in directory.items() if name != self.settings.name}
        self.control.set_directory(others)

    def _check_static(self, keyring: Keyring) -> None:
        for name in self.settings.peers:
            if WorkerId(name) not in keyring.peers and name != self.settings.name:
                raise ControlError(f"peers.{name}: not in the key directory {self.settings.keys}")

    def _take_keys(self, keyring: Keyring) -> None:
        """The key directory changed. On the node's thread."""
        for event in renewed_keys(self.node, self._keyring, keyring):
            self.loop.tell(event)
        self._keyring = keyring
        self.on_keys(keyring)

    # --- making

    def _door_config(self, keyring: Keyring, ranks: int) -> DoorwayConfig:
        return DoorwayConfig(
            me=self.peer,
            ranks=ranks,
            groups=len(self.facts.layout.groups),
            ticket_keys=keyring.ticket_keys,
            ticket_ttl_s=self.settings.ticket_ttl_s,
            mint=lambda: TransferId(secrets.token_hex(16)),
            wall=time.time,
        )

    def _make_node(self, keyring: Keyring, ranks: int) -> Node:
        planes = [self.links.transports(rank) for rank in range(ranks)]
        common = [name for name in planes[0] if all(name in rank for rank in planes)]
        identity = Identity(
            me=self.peer,
            host=boot_id(),
            compat=self.facts.compat,
            layout=self.facts.layout,
            transports=tuple(planes[0][name].capabilities for name in common),
            ticket_keys=keyring.ticket_keys,
            wall_offset_s=time.time() - time.monotonic(),
            exact_epochs=self.facts.exact_epochs,
            role_of=keyring.role_of,
        )
        ledger = Ledger(identity, self.settings.protocol(), self.doorway.epochs.all_judged)
        progress, recorder = self.links.drain_progress, self.watch.recorder
        return Node(ledger, self.control, planes, self.doorway, self.shelf, extra=progress, recorder=recorder)

    def _spans(self) -> SpanExport | None:
        return of_worker(self.settings.otlp_endpoint, self.facts.role, self.settings.name)

    def _make_shelf(self, ranks: int) -> Shelf:
        """The store as all ranks together reach it; each is told in whose name."""
        shelves = [shelf for rank in range(ranks) if (shelf := self.links.shelf(rank)) is not None]
        if len(shelves) < ranks:
            raise RuntimeError("kvbaton: a worker of this engine was started without its store; restart the engine")
        for shelf in shelves:
            shelf.open(compat_digest(self.facts.compat))
        return Shelf(shelves, self.settings.shelf())
