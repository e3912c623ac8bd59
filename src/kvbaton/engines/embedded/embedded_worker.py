"""One worker process of the embedded cluster: engine thread, node loop, data planes, discovery, HTTP.

Started in the order in which each needs the one before, registered last (a worker that is listed can serve), and taken
down in reverse. Everything it holds is anonymous or unlinked from birth: kill -9 leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import kvbaton
from kvbaton.api.foreign import Lookup
from kvbaton.api.http import run, serving
from kvbaton.api.params import Mode
from kvbaton.api.tokens import guard
from kvbaton.control.address_book import AddressBook
from kvbaton.control.keyring import Keyring, load
from kvbaton.control.moriio import FORGET_S
from kvbaton.control.registry.member import MemberState
from kvbaton.control.registry.registry_client import RegistryClient
from kvbaton.control.registry.registry_messages import DirectoryEntry, Held, Registration
from kvbaton.control.zmq import ZmqControl
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.announcing import Herald, announcement
from kvbaton.engines.embedded.backend import MODEL_NAME, EngineBackend, EngineThread
from kvbaton.engines.embedded.embedded_connector import BatonConnector
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.embedded_storing import NO_STATS
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig, ModelConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Sampling
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.engines.embedded.kv_layout import compat_key, engine_layout
from kvbaton.engines.embedded.kv_memory import KvGeometry
from kvbaton.engines.embedded.store_access import StoreAccess, open_store
from kvbaton.engines.embedded.worker_draining import Door, DrainSettings, Stopping, drain
from kvbaton.engines.embedded.worker_options import DIALECTS, WorkerOptions
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.key_renewal import renewed_keys
from kvbaton.node.node import Node
from kvbaton.node.node_loop import NodeLoop
from kvbaton.node.observation import Watch
from kvbaton.node.ticket_discard import discarded
from kvbaton.observe.metrics import node_metrics as node_figures
from kvbaton.observe.tracing.export import of_worker
from kvbaton.protocol.compat import digest as compat_digest
from kvbaton.protocol.events import Departed, DrainStarted
from kvbaton.protocol.ids import Incarnation, PeerId, RequestId, TransferId, WorkerId, rank_peer
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.transports import catalogue
from kvbaton.transports.core.host_identity import boot_id
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import Transport

log = logging.getLogger(__name__)

TICKET_TTL_S = 120.0


def engine_config(options: WorkerOptions) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(seed=options.seed),
        cache=CacheConfig(blocks=options.blocks, block_tokens=options.block_tokens, tp=options.tp),
        seqs_max=options.max_num_seqs,
        waiting_max=options.waiting_max,
        on_load_failure=options.policy,
    )


class Worker:
    """Everything of one worker but its HTTP door."""

    def __init__(self, options: WorkerOptions, keyring: Keyring, config: EngineConfig | None = None) -> None:
        config = config or engine_config(options)
        geometry = KvGeometry(config.model, config.cache)
        self.options = options
        self.planes = catalogue.offered(
            options.transport, checksum=options.checksum, require_enforcement=options.require_enforcement
        )
        self.peer = PeerId(WorkerId(options.name), Incarnation(secrets.randbits(63)))
        spans = of_worker(options.otlp_endpoint, options.role, options.name)
        self.watch = Watch(self.peer, directory=options.flight_dir, spans=spans)
        self.regions: list[Region] = [allocate(geometry.region_bytes) for _ in range(options.tp)]
        self.doorway = self._make_doorway(config, keyring)
        self.compat = compat_key(config.model, kvbaton.__version__)
        self.store = self._open_store(geometry, keyring) if options.store else None
        storing = self.store.storing if self.store is not None else None
        connector = BatonConnector(
            self.doorway, config.model.groups, options.block_tokens, options.policy, storing=storing
        )
        self.engine = Engine(config, connector, [region.view for region in self.regions])
        self.thread = EngineThread(self.engine, self.doorway)
        self.control = ZmqControl(keyring, f"tcp://{_bracketed(options.control_host)}:{options.control_port}")
        self.book = AddressBook()
        self.lookup = self._make_lookup(keyring)
        self.node = self._make_node(geometry, keyring)
        self.watch.begin(self.node, self._gauges)
        self.loop = NodeLoop(self.node, self.control)
        self.keyring = keyring
        self.control.on_keys = self._take_keys
        self.backend = EngineBackend(self.thread, self.doorway, self.stats)
        self.door = Door(self.backend)

    def start(self) -> None:
        self.loop.start()
        self.thread.start()

    def stop(self) -> None:
        if self.store is not None:
            self.store.end(self.loop)
        ended = self.thread.stop()
        if self.store is not None and ended:
            self.store.settle(self.engine.connector)
        self.loop.stop()
        self.watch.close()
        if self.store is not None:
            self.store.close()
        self.engine.close()
        for region in self.regions:
            region.close()

    def registration(self, url: str) -> Registration:
        options = self.options
        return Registration(
            worker=self.peer.worker,
            incarnation=self.peer.incarnation,
            role=options.role,
            http_address=url.removeprefix("http://"),
            control_endpoint=self.control.endpoint,
            modes=tuple(options.modes),
            transports=self.planes,
            compat_digest=compat_digest(self.compat),
            tp_size=options.tp,
            model=MODEL_NAME,
            host=boot_id(),
        )

    def on_directory(self, entries: Sequence[DirectoryEntry]) -> None:
        others = {str(entry.worker): entry.control_endpoint for entry in entries}
        self.book.replace({**others, self.options.name: self.control.endpoint})
        self.control.set_directory({entry.worker: (entry.control_endpoint, entry.public_key) for entry in entries})

    def on_departed(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self.loop.tell(Departed(worker, incarnation))

    def on_discard(self, tickets: Sequence[str]) -> None:
        for event in discarded(self.doorway, tickets):
            self.loop.tell(event)

    def _take_keys(self, keyring: Keyring) -> None:
        """The key directory changed. On the node's thread."""
        for event in renewed_keys(self.node, self.keyring, keyring):
            self.loop.tell(event)
        self.keyring = keyring
        self.lookup.ticket_key = keyring.ticket_keys[0]

    def held(self) -> Held:
        """What must end before this worker can go without costing anybody anything."""
        ledger, engine = self.node.ledger, self.engine.stats()
        return Held(
            requests=max(self.door.inside, engine.running + engine.waiting + engine.loading),
            leases=len(ledger.producer.leases),
            intakes=len(ledger.consumer.by_handoff),
            claims=len(ledger.producer.parked),
        )

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges; reads of ints and small dicts, so no lock and no wait for the loop."""
        ledger = self.node.ledger
        counts = dict(ledger.desk.counts)
        engine = self.engine.stats()
        links = list(ledger.consumer.links.by_worker.values())
        ends = _by_name(counts, "ends.")
        return {
            "worker": str(self.peer.worker),
            "incarnation": f"{self.peer.incarnation:016x}",
            **node_figures.figures(ledger, self.control.counters, time.monotonic()),
            "data_refused_total": node_figures.data_refused(self.node.ranks),
            "peers": max(len(self.book) - 1, 0),
            "pins": self.doorway.pinned_blocks,
            "leases": len(ledger.producer.leases),
            "bytes_moved_total": counts.get("bytes_moved", 0),
            "handoffs_total": sum(ends.values()),
            "delivered_total": ends.get("delivered", 0),
            "running": engine.running,
            "waiting": engine.waiting,
            "loading": engine.loading,
            "free_blocks": engine.free_blocks,
            "blocks": engine.blocks,
            "planes": list(self.planes),
            "links": {str(link.worker): link.transport.name for link in links if link.transport is not None},
            "versions": {str(link.worker): link.version for link in links if link.transport is not None},
            **(self.store.storing.stats() if self.store is not None else NO_STATS),
            "faults_total": self.loop.faults + self.thread.faults,
        }

    def _gauges(self) -> Mapping[str, float]:
        engine = self.engine.stats()
        return {
            "blocks": engine.blocks,
            "free_blocks": engine.free_blocks,
            "running": engine.running,
            "waiting": engine.waiting,
            "loading": engine.loading,
            **({"store_pins": self.store.storing.stats()["store_pins"]} if self.store is not None else {}),
        }

    # --- making

    def _make_doorway(self, config: EngineConfig, keyring: Keyring) -> Doorway:
        door = DoorwayConfig(
            me=self.peer,
            ranks=config.cache.tp,
            groups=len(config.model.groups),
            ticket_keys=keyring.ticket_keys,
            ticket_ttl_s=TICKET_TTL_S,
            mint=lambda: TransferId(secrets.token_hex(16)),
            wall=time.time,
        )
        return Doorway(door, EpochTable(config.cache.blocks))

    def _make_lookup(self, keyring: Keyring) -> Lookup:
        options = self.options
        return Lookup(
            mode=Mode(DIALECTS[options.announce_as]),
            modes=tuple(Mode(mode) for mode in options.modes),
            me=self.peer.worker,
            ticket_key=keyring.ticket_keys[0],
            ttl_s=TICKET_TTL_S,
            peer_at=self.book.at,
        )

    def _make_node(self, geometry: KvGeometry, keyring: Keyring) -> Node:
        options = self.options
        ranks = [self._make_transports(rank, region) for rank, region in enumerate(self.regions)]
        identity = Identity(
            me=self.peer,
            host=boot_id(),
            compat=self.compat,
            layout=engine_layout(geometry),
            transports=tuple(transport.capabilities for transport in ranks[0].values()),
            ticket_keys=keyring.ticket_keys,
            wall_offset_s=time.time() - time.monotonic(),
            role_of=keyring.role_of,
        )
        settings = Settings(
            lease_s=options.lease_s,
            transfer_timeout=options.transfer_timeout,
            defer_timeout=options.defer_timeout,
            claim_timeout=options.claim_timeout,
            max_hold_s=max(180.0, options.lease_s, options.defer_timeout + options.transfer_timeout),
        )
        ledger = Ledger(identity, settings, self.doorway.epochs.all_of)
        shelf = self.store.shelf if self.store is not None else None
        return Node(ledger, self.control, ranks, self.doorway, shelf, recorder=self.watch.recorder)

    def _open_store(self, geometry: KvGeometry, keyring: Keyring) -> StoreAccess:
        views = [region.view for region in self.regions]
        compat = compat_digest(self.compat)
        return open_store(self.options, keyring, engine_layout(geometry), views, compat, self.doorway)

    def _make_transports(self, rank: int, region: Region) -> dict[str, Transport]:
        me = rank_peer(self.peer, rank)
        settings = catalogue.PlaneSettings(self.options.control_host, self.options.checksum, self.options.encrypt)
        return {name: catalogue.make(name, me, settings, [region.view]) for name in self.planes}


def main(options: WorkerOptions) -> int:
    """Serve until SIGTERM or SIGINT, or until an operator has this worker drained."""
    return run(_serve(options))


async def _serve(options: WorkerOptions) -> int:
    worker = Worker(options, load(options.keys, options.name))
    stop = Stopping()
    worker.thread.on_death = stop.now  # a worker that cannot answer must not stay on the list
    handoffs, disown = worker.watch.handoffs, worker.doorway.disown
    app = worker_app(worker.door, lookup=worker.lookup, handoffs=handoffs, disown=disown)
    if options.http_is_guarded:
        app.middlewares.append(guard(options.name, lambda: worker.doorway.config.ticket_keys))
    async with _running(worker), serving(app, options.http_host, options.http_port) as url:
        with stop.on_signals(), _dumping(worker), _registered(worker, url, stop) as client:
            print(f"{options.name} {worker.peer.incarnation:016x} serves {url}", flush=True)
            async with _announced(worker, url, client) as herald:
                await stop.begun.wait()
                await _drained(worker, client, herald, stop)
    return 1 if worker.thread.faults else 0


@contextlib.asynccontextmanager
async def _running(worker: Worker) -> AsyncIterator[None]:
    worker.start()
    try:
        yield
    finally:
        await asyncio.to_thread(worker.stop)


@contextlib.contextmanager
def _dumping(worker: Worker) -> Iterator[None]:
    """SIGUSR2 has the records of handoffs written down."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, worker.watch.dumps.ask)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR2)


@contextlib.contextmanager
def _registered(worker: Worker, url: str, stop: Stopping) -> Iterator[RegistryClient]:
    options = worker.options
    client = RegistryClient(
        worker.keyring,  # not loaded again: the registry tells the others under which key this worker listens
        (WorkerId(options.registry_name), options.registry),
        worker.registration(url),
        on_directory=worker.on_directory,
        on_departed=worker.on_departed,
        on_drain=stop.ask_from_thread,
        on_discard=worker.on_discard,
        report=worker.watch.report,
        on_show=worker.watch.recorder.show,
    )
    client.start()
    try:
        yield client
    finally:
        client.close()


@contextlib.asynccontextmanager
async def _announced(worker: Worker, url: str, client: RegistryClient) -> AsyncIterator[Herald | None]:
    """Known to another system's router too, where one was named, from when the registry lists this worker."""
    options = worker.options
    if not options.announce_to:
        yield None
        return
    said = announcement(options, url.removeprefix("http://"), worker.control.endpoint)
    herald = Herald(options.announce_to, said)
    beginning = asyncio.create_task(herald.announce_when(lambda: client.state is MemberState.LISTED))
    try:
        yield herald
    finally:
        beginning.cancel()
        await asyncio.to_thread(herald.stop)


async def _drained(worker: Worker, client: RegistryClient, herald: Herald | None, stop: Stopping) -> None:
    """Finish what is under way; a router that is only told by pings has to forget this worker first."""
    if herald is not None:
        await asyncio.to_thread(herald.stop)
    settings = DrainSettings(drain_s=worker.options.drain_s, forget_s=FORGET_S if herald is not None else 0.0)
    await drain(
        worker.door, client, worker.held, settings, stop.at_once, on_shut=lambda: worker.loop.tell(DrainStarted())
    )


def reference_answers(prompts: Sequence[str | Sequence[int]], max_tokens: int, seed: int = 7) -> list[str]:
    """What one engine, that hands nothing over, answers greedily: the oracle of `up --check` and of tests."""
    engine = Engine(EngineConfig(model=ModelConfig(seed=seed), cache=CacheConfig(blocks=4096)))
    texts = [""] * len(prompts)
    for index, prompt in enumerate(prompts):
        tokens = tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        engine.add_request(EngineRequest(RequestId(str(index)), tokens, Sampling(max_tokens=max_tokens)))
    while engine.has_work():
        for output in engine.step():
            texts[int(output.request_id)] += output.text
    engine.close()
    return texts


def _by_name(counts: Mapping[str, int], front: str) -> dict[str, int]:
    return {name.removeprefix(front): count for name, count in counts.items() if name.startswith(front)}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
