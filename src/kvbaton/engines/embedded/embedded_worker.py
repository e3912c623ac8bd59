"""One worker process of the embedded cluster: the engine and its thread, its `ClusterNode`, HTTP.

Parts are started in the order of their dependencies, registered last (a registered worker can serve), and stopped in
reverse. Everything it holds is anonymous or unlinked from birth: kill -9 leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

import kvbaton
from kvbaton.api.http.http_server import serving
from kvbaton.api.http.server_loop import run
from kvbaton.api.params import ForeignLookup, HistoryWay, Mode
from kvbaton.api.tokens import guard
from kvbaton.control.addressing import moriio_address, p2p_nccl_address
from kvbaton.control.joining.join_client import JoinedMember, enrolled
from kvbaton.control.keyring import Keyring
from kvbaton.control.plain.announcer import (
    FORGET_S,
    MoriioAnnouncer,
    MoriioRegistration,
    TransferMode,
    p2p_nccl_registration,
    registration,
)
from kvbaton.control.registry.registry_group import RegistryGroup
from kvbaton.control.registry.statements import HeldReport, MemberState
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.backend import MODEL_NAME, EngineBackend, EngineThread
from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig, ModelConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Sampling
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.engines.embedded.memory.kv_layout import compat_key, engine_layout
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry
from kvbaton.engines.embedded.store_access import open_store
from kvbaton.engines.embedded.worker_draining import DrainingDoor, DrainSettings, Stopping, drain
from kvbaton.engines.embedded.worker_options import DIALECTS, WorkerOptions
from kvbaton.engines.side.guard import faults
from kvbaton.node.cluster_node import (
    TICKET_TTL_S,
    ClusterNode,
    ClusterSettings,
    EngineFacts,
    make_doorway,
    new_life,
)
from kvbaton.node.pin_budget import Fullness, budget_of
from kvbaton.observe.metrics import handoff_metrics as node_figures
from kvbaton.protocol.events import DrainStarted
from kvbaton.protocol.ids import PeerId, RequestId, rank_peer
from kvbaton.protocol.settings import Settings
from kvbaton.ranks.store_trust import bind_store
from kvbaton.transports import catalogue
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import Transport

log = logging.getLogger(__name__)

LISTED_POLL_S = 0.05
INTERVAL_S = 1.0  # vllm-router forgets after 4 to 5 s: at vLLM's 3 s one that comes late costs a worker its place


def engine_config(options: WorkerOptions) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(seed=options.seed),
        cache=CacheConfig(blocks=options.blocks, block_tokens=options.block_tokens, tp=options.tp),
        seqs_max=options.max_num_seqs,
        waiting_max=options.waiting_max,
        on_load_failure=options.policy,
    )


class EmbeddedWorker:
    """An embedded engine and its node in the cluster: everything of one worker except HTTP."""

    def __init__(
        self,
        options: WorkerOptions,
        keyring: Keyring,
        config: EngineConfig | None = None,
        member: JoinedMember | None = None,
    ) -> None:
        config = config or engine_config(options)
        geometry = KvGeometry(config.model, config.cache)
        self.options = options
        self._faults_before = faults.total()  # of this process, which may have had other workers
        self.planes = catalogue.offered(
            options.transport, checksum=options.checksum, require_enforcement=options.require_enforcement
        )
        self.regions: list[Region] = [allocate(geometry.region_bytes) for _ in range(options.tp)]
        facts = EngineFacts(
            me=new_life(options.name),
            role=options.role,
            blocks=config.cache.blocks,
            layout=engine_layout(geometry),
            compat=compat_key(config.model, kvbaton.__version__),
            tp_size=options.tp,
            model=MODEL_NAME,
            continues=str(HistoryWay.OUTPUT),
            context_tokens=config.model.context_tokens_max,
        )
        doorway = make_doorway(facts, keyring)
        views = [region.view for region in self.regions]
        self.store = open_store(options, keyring, facts, views, doorway) if options.store else None
        shelf = self.store.shelf if self.store is not None else None
        doorway.budget = budget_of(config.cache.blocks - 1, options.pin_share, options.pin_wait_s)
        self.connector = EmbeddedConnector(
            doorway, config, decodes=options.role != "prefill", turns=options.turns, shelf=shelf
        )
        self.fullness = Fullness()
        self.engine = Engine(config, self.connector, views)
        self.thread = EngineThread(self.engine, doorway)
        self.node = ClusterNode(
            facts,
            keyring,
            [self._make_transports(rank_peer(facts.me, rank), region) for rank, region in enumerate(self.regions)],
            doorway,
            _cluster_settings(options),
            store=shelf,
            gauges=self._gauges,
            member=member,
        )
        self.lookup = self._make_lookup(keyring)
        self.node.on_keys.append(lambda keyring: setattr(self.lookup, "ticket_key", keyring.ticket_keys[0]))
        if self.store is not None:
            bind_store(self.store.shelf, self.node)
        self.backend = EngineBackend(self.thread, doorway, self.stats)
        self.door = DrainingDoor(self.backend)

    def start(self) -> None:
        self.node.start()
        self.thread.start()

    def stop(self) -> None:
        self.node.end_store()
        ended = self.thread.stop()
        if self.store is not None and ended:
            self.store.settle(self.connector)
        self.node.stop()
        if self.store is not None:
            self.store.close()
        self.engine.close()
        for region in self.regions:
            region.close()

    def held(self) -> HeldReport:
        """What must end before this worker can leave without cost to others."""
        engine = self.engine.stats()
        requests = max(self.door.inside, engine.running + engine.waiting + engine.loading)
        return msgspec.structs.replace(self.node.held(), requests=requests)

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges; reads of ints and small dicts, so no lock and no wait for the loop."""
        node, ledger = self.node, self.node.ledger
        counts = dict(ledger.desk.counts)
        engine = self.engine.stats()
        links = list(ledger.consumer.links.by_worker.values())
        ends = _by_name(counts, "ends.")
        return {
            "worker": str(node.peer.worker),
            "role": self.options.role,
            "incarnation": f"{node.peer.incarnation:016x}",
            **node_figures.figures(ledger, node.control.counters, time.monotonic(), engine.blocks),
            "data_refused_total": node_figures.data_refused(node.ranks),
            **node.doorway.budget.figures(engine.blocks),
            **self.connector.prompts.figures(),
            "full": int(self._is_full()),
            "peers": max(len(node.book) - 1, 0),
            "pins": node.doorway.pinned_blocks,
            "pinned_ratio": round(node.doorway.pinned_blocks / engine.blocks, 4),
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
            **self.connector.stats(),
            "faults_total": node.loop.faults + self.thread.faults + faults.total() - self._faults_before,
        }

    def _gauges(self) -> Mapping[str, float]:
        engine = self.engine.stats()
        return {
            "blocks": engine.blocks,
            "free_blocks": engine.free_blocks,
            "running": engine.running,
            "waiting": engine.waiting,
            "loading": engine.loading,
            "full": float(self._is_full()),
            **(self.connector.prompts.gauges() if self.options.role != "prefill" else {}),
            **({"store_pins": self.connector.store_pins} if self.store is not None else {}),
        }

    def _is_full(self) -> bool:
        engine = self.engine.stats()
        return self.fullness.look(engine.free_blocks, engine.blocks, self.node.doorway.budget.waiting)

    def _make_lookup(self, keyring: Keyring) -> ForeignLookup:
        options = self.options
        return ForeignLookup(
            mode=Mode(DIALECTS[options.announce_as]),
            modes=tuple(Mode(mode) for mode in options.modes),
            me=self.node.peer.worker,
            ticket_key=keyring.ticket_keys[0],
            ttl_s=TICKET_TTL_S,
            peer_at=self.node.book.at,
        )

    def _make_transports(self, me: PeerId, region: Region) -> dict[str, Transport]:
        settings = catalogue.PlaneSettings(self.options.control_host, self.options.checksum, self.options.encrypt)
        return {name: catalogue.make(name, me, settings, [region.view]) for name in self.planes}


def _cluster_settings(options: WorkerOptions) -> ClusterSettings:
    return ClusterSettings(
        protocol=Settings(
            lease_s=options.lease_s,
            transfer_timeout=options.transfer_timeout,
            defer_timeout=options.defer_timeout,
            claim_timeout=options.claim_timeout,
            max_hold_s=max(180.0, options.lease_s, options.defer_timeout + options.transfer_timeout),
        ),
        control_host=options.control_host,
        control_port=options.control_port,
        flight_dir=options.flight_dir,
        otlp_endpoint=options.otlp_endpoint,
    )


def main(options: WorkerOptions) -> int:
    """Serve until SIGTERM or SIGINT, or until an operator drains this worker."""
    return run(_serve(options))


async def _serve(options: WorkerOptions) -> int:
    enrolment = await asyncio.to_thread(enrolled, options.credentials)
    options = options.settled(enrolment.keyring.name)
    worker = EmbeddedWorker(options, enrolment.keyring, member=enrolment.member)
    stop = Stopping()
    worker.thread.on_death = stop.now  # a worker that cannot answer must not stay on the list
    handoffs, disown = worker.node.watch.handoffs, worker.node.doorway.disown
    times = worker.thread.times.families
    app = worker_app(worker.door, lookup=worker.lookup, handoffs=handoffs, disown=disown, times=times)
    if options.http_is_guarded:
        app.guards.append(guard(options.name, lambda: worker.node.doorway.config.ticket_keys))
    async with _running(worker), serving(app, options.http_host, options.http_port) as url:
        with stop.on_signals(), _dumping(worker), _registered(worker, url, stop) as client:
            print(f"{options.name} {worker.node.peer.incarnation:016x} serves {url}", flush=True)
            async with _announced(worker, url, client) as herald:
                log.info("%s worker %s serves %s", options.role, options.name, url)
                await stop.begun.wait()
                await _drained(worker, client, herald, stop)
    log.info("[stopping] stopped")
    return 1 if worker.thread.faults else 0


@contextlib.asynccontextmanager
async def _running(worker: EmbeddedWorker) -> AsyncIterator[None]:
    worker.start()
    try:
        yield
    finally:
        await asyncio.to_thread(worker.stop)


@contextlib.contextmanager
def _dumping(worker: EmbeddedWorker) -> Iterator[None]:
    """SIGUSR2 dumps the records of handoffs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, worker.node.watch.dumps.ask)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR2)


@contextlib.contextmanager
def _registered(worker: EmbeddedWorker, url: str, stop: Stopping) -> Iterator[RegistryGroup]:
    options, node = worker.options, worker.node
    registered = node.registration(url.removeprefix("http://"), options.modes)
    try:
        yield node.join((options.registry_name, options.registry), registered, on_drain=stop.ask_from_thread)
    finally:
        node.leave()


@contextlib.asynccontextmanager
async def _announced(worker: EmbeddedWorker, url: str, client: RegistryGroup) -> AsyncIterator[Herald | None]:
    """Known to another system's router too, where one was named, from when the registry lists this worker."""
    options = worker.options
    if not options.announce_to:
        yield None
        return
    said = announcement(options, url.removeprefix("http://"), worker.node.control.endpoint)
    herald = Herald(options.announce_to, said)
    beginning = asyncio.create_task(herald.announce_when(lambda: client.state is MemberState.LISTED))
    try:
        yield herald
    finally:
        beginning.cancel()
        await asyncio.to_thread(herald.stop)


async def _drained(worker: EmbeddedWorker, client: RegistryGroup, herald: Herald | None, stop: Stopping) -> None:
    """Finish what is under way; a router that is only told by pings has to forget this worker first."""
    if herald is not None:
        await asyncio.to_thread(herald.stop)
    settings = DrainSettings(drain_s=worker.options.drain_s, forget_s=FORGET_S if herald is not None else 0.0)
    await drain(
        worker.door, client, worker.held, settings, stop.at_once, on_shut=lambda: worker.node.loop.tell(DrainStarted())
    )


def announcement(options: WorkerOptions, http_address: str, control_endpoint: str) -> MoriioRegistration:
    """The announcement for the router at `options.announce_to`; `ControlError` names an invalid field."""
    side: Literal["P", "D"] = "P" if options.role == "prefill" else "D"
    if options.announce_as == "p2p-nccl":
        return p2p_nccl_registration(side, http_address, p2p_nccl_address(control_endpoint))
    mode: TransferMode = "WRITE" if options.announce_as == "moriio-write" else "READ"
    address = moriio_address(control_endpoint)
    return registration(side, http_address, address, transfer_mode=mode, tp_size=options.tp)


class Herald:
    """Keeps one worker announced to another system's router.

    Laws: announced only once the registry lists it, since its peers know it by then; and no longer once it stops. These
    formats have no goodbye: vllm-router keeps sending for up to five seconds.
    """

    def __init__(self, router: str, said: MoriioRegistration) -> None:
        self._announcer = MoriioAnnouncer(f"tcp://{router}", said, interval_s=INTERVAL_S)
        self._stopped = False
        self._lock = threading.Lock()  # never started after it was stopped

    async def announce_when(self, is_listed: Callable[[], bool]) -> None:
        """Begin as soon as `is_listed`; without a deadline, as the worker itself serves without one."""
        while not is_listed():
            await asyncio.sleep(LISTED_POLL_S)
        with self._lock:
            if not self._stopped:
                self._announcer.start()

    def stop(self) -> None:
        """Stop announcing. From any thread, idempotent; blocks for milliseconds, at most the announcer's `STOP_S`."""
        with self._lock:
            self._stopped = True
        self._announcer.stop()


def reference_answers(prompts: Sequence[str | Sequence[int]], max_tokens: int, seed: int = 7) -> list[str]:
    """The greedy answers of one engine without handoffs: the oracle of `up --check` and of tests."""
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
