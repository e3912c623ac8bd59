"""An engine's presence in its cluster: its `ClusterNode` over links to its ranks, and how routers come to list it.

Laws: it is made once all ranks have said where their caches lie, and listed once its HTTP server answers, by a thread
that waits for that (engines serve long after their scheduler was made); one without such a server is listed at once. A
drain takes it off routers' choice and never ends the engine, which is its operator's. The registry orders it, or a file
whose making is the order (`drain_file`), for platforms that run a command in the engine's container before they end it.
The orders of starting and stopping are `node/cluster_node.py`'s.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from kvbaton.control.addressing import ControlError, moriio_address
from kvbaton.control.joining.join_client import Enrolment
from kvbaton.control.keyring import Keyring
from kvbaton.control.plain.announcer import FORGET_S, MoriioAnnouncer
from kvbaton.control.plain.announcer import registration as moriio_registration
from kvbaton.control.registry.registry_group import RegistryGroup
from kvbaton.control.registry.statements import HeldReport
from kvbaton.engines.shared.connector_settings import ConnectorSettings, Moriio
from kvbaton.node.cluster_node import ClusterNode, ClusterSettings, EngineFacts, make_doorway
from kvbaton.node.node_loop import dump_on_signal
from kvbaton.node.pin_budget import Fullness
from kvbaton.node.prompt_account import PromptAccount
from kvbaton.protocol.content import compat_digest
from kvbaton.protocol.ids import WorkerId
from kvbaton.ranks.engine_store import EngineStore
from kvbaton.ranks.rank_link import RankLinks
from kvbaton.ranks.rank_messages import RankInvitation
from kvbaton.ranks.store_trust import bind_store

log = logging.getLogger(__name__)

HEALTH_POLL_S = 0.25
HEALTH_WAIT_S = 5.0
DRAIN_POLL_S = 0.5
POLL_S = 0.5
QUIET_S = 2.0
ASK_S = 5.0
STOP_S = 3.0
_VLLM, _SGLANG = r"vllm:num_requests_(?:running|waiting)", r"sglang:num_(?:running|(?:\w+_)?queue)_reqs"
_GAUGE = re.compile(rf"^(?:{_VLLM}|{_SGLANG})(?:\{{([^}}]*)\}})? ([0-9.eE+]+)$", re.MULTILINE)


class CountedPool(Protocol):
    """An engine's blocks."""

    @property
    def free_blocks(self) -> int: ...


class CountedRequests(Protocol):
    """An engine's requests, by state."""

    def figures(self) -> dict[str, float]: ...


class RankPlace(Protocol):
    """One data-parallel rank's place among all."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def speaks(self) -> bool:
        """Whether it announces its HTTP server, where that is done once for all ranks."""
        ...


class Presence:
    """Everything of an engine that speaks to others. One per scheduler process."""

    def __init__(
        self,
        settings: ConnectorSettings,
        enrolment: Enrolment,
        facts: EngineFacts,
        ranks: Sequence[RankInvitation],
        place: RankPlace | None = None,
        *,
        modes: Sequence[str] | None = None,
    ) -> None:
        """`modes`: what routers are told, where that is not what the settings say."""
        keyring = enrolment.keyring
        _check_static(settings, keyring)
        self.settings = settings
        self._modes = settings.modes if modes is None else modes
        self._place = place
        doorway = make_doorway(facts, keyring, settings.ticket_ttl_s)

        def wake() -> None:
            doorway.wake_node()  # looked up when it is needed: the node's loop sets it when it starts

        self.links = RankLinks(ranks, me=facts.me, tell=wake)
        self.shelf = _make_shelf(self.links, facts, settings) if settings.store else None
        self.node = ClusterNode(
            facts,
            keyring,
            [self.links.transports(rank) for rank in range(len(self.links))],
            doorway,
            _cluster_settings(settings),
            store=self.shelf,
            links=self.links,
            gauges=self._gauges,
            member=enrolment.member,
        )
        if self.shelf is not None:
            bind_store(self.shelf, self.node)
        self.node.know({WorkerId(name): (endpoint, "") for name, endpoint in settings.peers.items()})
        self._pool: CountedPool | None = None
        self._prompts = PromptAccount()
        self._states: CountedRequests | None = None
        self._fullness = Fullness()
        self._announcer: MoriioAnnouncer | None = None
        self._closing = threading.Event()
        self._undrained = threading.Lock()  # taken once, by the first order
        self._herald = threading.Thread(target=self._be_listed, name="kvbaton-herald", daemon=True)

    def observe(self, pool: CountedPool, prompts: PromptAccount, states: CountedRequests) -> None:
        """What is told of the engine: its free blocks, who computed its prompts, and how many requests it has."""
        self._pool, self._prompts, self._states = pool, prompts, states

    def is_full(self) -> bool:
        """From any thread: reads of ints."""
        free = self._pool.free_blocks if self._pool is not None else self.node.facts.blocks
        return self._fullness.look(free, self.node.facts.blocks - 1, self.node.doorway.budget.waiting)

    def _gauges(self) -> dict[str, float]:
        facts = self.node.facts
        told = self._prompts.gauges() if facts.role != "prefill" else {}
        if self._pool is not None and self._states is not None:
            told |= {"free_blocks": float(self._pool.free_blocks), **self._states.figures()}
        # vLLM's null block is never free
        return {"blocks": float(facts.blocks - 1), "full": float(self.is_full()), **told}

    def start(self) -> None:
        node = self.node
        if self.settings.drain_file:
            Path(self.settings.drain_file).unlink(missing_ok=True)  # of an earlier life
        node.start()
        dump_on_signal(node.watch.dumps)
        if self.settings.registry or self.settings.moriio:
            self._herald.start()
        log.info("kvbaton: %s listens at %s for %s", node.peer, node.control.endpoint, ", ".join(node.transports))

    def stop(self) -> None:
        """Say goodbye; bounded, and not needed for anybody's safety."""
        self._closing.set()
        if self._announcer is not None:
            with contextlib.suppress(Exception):
                self._announcer.stop(STOP_S)
        self.node.stop(STOP_S)

    # --- discovery

    def _be_listed(self) -> None:
        """Wait until this engine answers its own clients, then let routers know."""
        if self.settings.http_address and not self._answers():
            return
        settings, node = self.settings, self.node
        try:
            if settings.moriio is not None and (self._place is None or self._place.speaks):
                self._announcer = self._make_announcer(settings.moriio)  # before a drain can be asked for
            if settings.registry:
                registration = node.registration(settings.http_address or "", self._modes, stays=True)
                node.join((settings.registry_name, settings.registry), registration, on_drain=self._on_drain)
            if self._announcer is not None:
                self._announcer.start()
        except ControlError as error:
            log.error("[not-listed] kvbaton: %s is not listed: %s", node.peer, error)
        if settings.drain_file:
            self._await_order(Path(settings.drain_file))

    def _await_order(self, file: Path) -> None:
        while not self._closing.wait(DRAIN_POLL_S):
            if file.exists():
                self._on_drain()
                return

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

    def _make_announcer(self, asked: Moriio) -> MoriioAnnouncer:
        facts = self.node.facts
        role: Literal["P", "D"] = "P" if facts.role == "prefill" else "D"
        message = moriio_registration(
            role,
            self.settings.http_address or "",
            moriio_address(self.node.control.endpoint),
            transfer_mode=asked.transfer_mode,
            tp_size=facts.tp_size,
            dp_size=1 if self._place is None else self._place.size,
        )
        return MoriioAnnouncer(f"tcp://{asked.router}", message, interval_s=asked.interval_s)

    def _on_drain(self) -> None:
        """Routers send nobody new from now on. Its operator ends the engine, and is told when it is idle."""
        if not self._undrained.acquire(blocking=False):
            return
        log.info("kvbaton: %s drains", self.node.peer)
        client = self.node.client
        if client is not None:
            client.drain()
            # routers of MoRI-IO get no word: they may send requests until they have forgotten this engine
            forget_s = 0.0 if self.settings.moriio is None else FORGET_S
            rank = None if self._place is None else self._place.rank
            DrainWatch(client, self.settings.http_address or "", self.node.held, self._closing, forget_s, rank).start()
        if self._announcer is not None:
            self._announcer.stop(STOP_S)


def _check_static(settings: ConnectorSettings, keyring: Keyring) -> None:
    for name in settings.peers:
        if WorkerId(name) not in keyring.peers and name != settings.name:
            raise ControlError(f"peers.{name}: not in the key directory {settings.keys}")


def _cluster_settings(settings: ConnectorSettings) -> ClusterSettings:
    return ClusterSettings(
        protocol=settings.protocol(),
        control_host=settings.control_host,
        control_port=settings.control_port,
        flight_dir=settings.flight_dir,
        otlp_endpoint=settings.otlp_endpoint,
    )


def _make_shelf(links: RankLinks, facts: EngineFacts, settings: ConnectorSettings) -> EngineStore:
    """The store as all ranks together reach it; each is told in whose name."""
    shelves = [shelf for rank in range(len(links)) if (shelf := links.store(rank)) is not None]
    if len(shelves) < len(links):
        raise RuntimeError("kvbaton: a worker of this engine was started without its store; restart the engine")
    for shelf in shelves:
        shelf.open(compat_digest(facts.compat))
    return EngineStore(shelves, settings.shelf())


def requests_in(metrics: str, rank: int | None = None) -> int | None:
    """How many requests run or wait, by the server's own gauges; None where it has none. `rank`: of that one alone."""
    label = "" if rank is None else f'engine="{rank}"'
    found = [float(value) for labels, value in _GAUGE.findall(metrics) if label in labels]
    return int(sum(found)) if found else None


class DrainWatch:
    """Tells the registry what a draining server still does, from a thread of its own until `closing`.

    Laws: routers send nobody new, and the operator learns when nothing is left; the engine is not ended from here.
    "Nothing" is said only when the server itself says that no request runs or waits, the ledger holds nothing for
    anybody, and both have been so for `QUIET_S`; a server that cannot be asked is never idle. An engine without a
    server of its own is asked nothing: the ledger alone decides, since its host knows its requests.
    """

    def __init__(
        self,
        client: RegistryGroup,
        http_address: str,
        holds: Callable[[], HeldReport],
        closing: threading.Event,
        forget_s: float = 0.0,
        rank: int | None = None,
    ) -> None:
        """`http_address`: "" where the engine has none. `forget_s`: routers that get no word may send requests for this
        long. `rank`: of the data-parallel ranks behind that address, the one that drains."""
        self._client = client
        self._url = f"http://{http_address}/metrics" if http_address else ""
        self._rank = rank
        self._holds = holds
        self._closing = closing
        self._quiet_since = time.monotonic()
        self._forgotten_at = time.monotonic() + forget_s if forget_s else -math.inf
        self._thread = threading.Thread(target=self._run, name="kvbaton-drain", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self._client.tell_held(self.told(time.monotonic()))

    def told(self, now: float) -> str:
        """What to say now."""
        requests = self._requests()
        held = self._holds() if requests is None else msgspec.structs.replace(self._holds(), requests=requests)
        if requests is None or not held.nothing or not self._client.is_known_to_drain:
            self._quiet_since = now
        if requests is None:
            return f"{held}; {self._url} does not say how many requests there are"
        too_soon = now < max(self._quiet_since + QUIET_S, self._forgotten_at)
        return "the end of its last request" if held.nothing and too_soon else str(held)

    def _requests(self) -> int | None:
        if not self._url:
            return 0
        try:
            with urllib.request.urlopen(self._url, timeout=ASK_S) as answer:
                return requests_in(answer.read().decode(errors="replace"), self._rank)
        except (OSError, http.client.HTTPException):
            return None
