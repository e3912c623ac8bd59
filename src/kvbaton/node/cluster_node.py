"""An engine's node in its cluster: the one assembly of doorway, ledger, control plane, transports, loop and discovery.

    facts = EngineFacts(me=new_life("p0"), role="prefill", blocks=…, layout=…, compat=…)
    doorway = make_doorway(facts, keyring)
    engine = MyEngine(doorway)  # which has the memory that transports are made over
    node = ClusterNode(facts, keyring, [{"shm": …}], doorway)  # per rank its transports by name
    node.start(); node.join(registry, node.registration(http_address)); …; node.stop()

Laws, all of order. *Construction* refuses whatever is unavailable (an address, a key) before anything runs. *Starting*
goes from dependencies to dependents: links to ranks, then the node's loop; the engine joins the registry last, so that
a registered engine can serve. *Stopping* is the reverse: leave the registry, so that routers choose others; stop the
loop, which says goodbye to the peers and closes transports and control plane; write the records, which contain that
goodbye; close the store, which is no longer used; close the links to ranks, which carried the goodbye. Before it, an
engine with a store calls `end_store` and performs the resulting duties while the loop still runs, so that no block
stays pinned; after it, the owner of the memory frees it. Each step has a deadline, and a step that fails does not
prevent the next. Nothing depends on a clean stop: a killed process leaves nothing behind.

When the key directory changes, the node's thread takes the new ticket keys into the ledger and the doorway at once,
and a peer whose key is gone, or is for another role now, has departed. Of peers that joined (`control/joining`) the
registry's directory tells, with certificates; a node that joined itself is told of ticket keys there too.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbaton.control.addressing import AddressBook, ControlError, registry_places
from kvbaton.control.joining.join_client import JoinedMember
from kvbaton.control.joining.join_messages import JoinFault, opened_card
from kvbaton.control.joining.join_token import Membership
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry.registry_client import OnDrain
from kvbaton.control.registry.registry_group import RegistryGroup
from kvbaton.control.registry.registry_messages import DirectoryEntry, Registration, Role, addresses
from kvbaton.control.registry.statements import HeldReport, MemberState
from kvbaton.control.zmq import ZmqControl
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node, Rank
from kvbaton.node.node_loop import More, NodeLoop, NodeObservation
from kvbaton.node.ports import StorePort
from kvbaton.observe.tracing.export import of_worker
from kvbaton.protocol.content import compat_digest
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.events import Departed, Discarded, Event, LineRefused, MembersGone
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.ids import Incarnation, PeerId, TransferId, WorkerId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.transports.core.shared_memory import boot_id

STOP_S = 5.0
TICKET_TTL_S = 120.0
MODEL_CHARS_MAX = 256


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as its cluster knows it; fixed once the engine has its KV cache."""

    me: PeerId
    role: Role
    blocks: int
    layout: EngineLayout
    compat: dict[str, str]  # everything that changes the meaning of a byte; engines that differ are never paired
    exact_epochs: bool = True  # the block pool reports each reuse before it happens
    tp_size: int = 1
    model: str = ""
    dp_rank: int = 0  # which of the engines behind its HTTP address it is
    dp_size: int = 1  # how many those are
    continues: str = ""  # how it goes on with an answer that another began; "": it cannot
    context_tokens: int = 0  # of prompt and answer, where what it samples first is what any front end would tell


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a node; the defaults are for one host."""

    protocol: Settings = msgspec.field(default_factory=Settings)
    control_host: str = "127.0.0.1"
    control_port: int = 0
    flight_dir: str = ""  # where records of failed handoffs are written
    otlp_endpoint: str = ""  # where spans of sampled requests go
    records: bool = True  # record handoffs; benchmarks of the bare node turn it off


class NodeStore(StorePort, Protocol):
    """A store that the node puts blocks into, and that is closed after it. `close` is idempotent and bounded."""

    def close(self) -> None: ...


class NodeLinks(Protocol):
    """Links to ranks in other processes; `NodeLinks` is one."""

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> bool: ...

    def drain_progress(self) -> Sequence[Event]: ...


def new_life(name: str) -> PeerId:
    """A new identity for an engine that starts; the same name after a restart is another peer."""
    return PeerId(WorkerId(name), Incarnation(secrets.randbits(63)))


def make_doorway(facts: EngineFacts, keyring: Keyring, ticket_ttl_s: float = TICKET_TTL_S) -> Doorway:
    """The engine's doorway, made first: an adapter needs it before there are transports."""
    config = DoorwayConfig(
        me=facts.me,
        ranks=len(facts.layout.ranks),
        groups=len(facts.layout.groups),
        ticket_keys=keyring.ticket_keys,
        ticket_ttl_s=ticket_ttl_s,
        mint=lambda: TransferId(secrets.token_hex(16)),
        wall=time.time,
    )
    return Doorway(config, EpochTable(facts.blocks))


class ClusterNode:
    """Everything of an engine that talks to others. It has its own threads; the engine talks to it via the
    `Doorway`."""

    def __init__(
        self,
        facts: EngineFacts,
        keyring: Keyring,
        ranks: Sequence[Rank],
        doorway: Doorway,
        settings: ClusterSettings | None = None,
        *,
        store: NodeStore | None = None,
        links: NodeLinks | None = None,
        gauges: More = dict,
        member: JoinedMember | None = None,
    ) -> None:
        """`ranks`: transports by name, per rank, over its memory. `links`: what they are reached by, where they live in
        other processes. `gauges`: figures of the engine, for its reports to the router. `member`: of an engine that
        joined with a token, whose keyring this is."""
        settings = settings or ClusterSettings()
        if len(ranks) != len(facts.layout.ranks):
            raise ValueError(f"ranks: got transports of {len(ranks)}; the layout has {len(facts.layout.ranks)}")
        self.facts = facts
        self.keyring = keyring
        self.doorway = doorway
        self.store = store
        self.book = AddressBook()
        self.on_keys: list[Callable[[Keyring], object]] = []  # after the node has taken them; on its thread
        self.client: RegistryGroup | None = None
        self._links = links
        self._member = member
        self._born = time.time()
        self.control = ZmqControl(keyring, f"tcp://{_bracketed(settings.control_host)}:{settings.control_port}")
        spans = of_worker(settings.otlp_endpoint, facts.role, facts.me.worker)
        self.watch = NodeObservation(facts.me, directory=settings.flight_dir, spans=spans)
        ledger = Ledger(_identity(facts, keyring, ranks), settings.protocol, doorway.epochs.all_judged)
        recorder = self.watch.recorder if settings.records else None
        extra = links.drain_progress if links is not None else None
        self.node = Node(ledger, self.control, ranks, doorway, store, extra=extra, recorder=recorder)
        self.watch.begin(self.node, gauges)
        self.loop = NodeLoop(self.node, self.control)
        self.control.on_keys = self._take_keys
        self.control.on_refused = lambda worker: self.loop.tell(LineRefused(worker))

    @property
    def peer(self) -> PeerId:
        return self.facts.me

    @property
    def ledger(self) -> Ledger:
        return self.node.ledger

    @property
    def port_faults(self) -> Mapping[str, int]:
        """Exceptions of transports, control plane and store, counted by call."""
        return self.node.faults

    @property
    def ranks(self) -> Sequence[Rank]:
        return self.node.ranks

    @property
    def address(self) -> tuple[str, str]:
        """The address and public key of this node: what peers give to `know`."""
        return self.control.endpoint, self.keyring.public

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that all ranks have, best first."""
        return self.ledger.desk.identity.transport_names

    # --- lifecycle

    def start(self) -> None:
        if self._links is not None:
            self._links.start()
        self.loop.start()
        if self._member is not None:
            self._member.on_keyring = self._take_membership
            self._take_membership(self._member.keyring)

    def join(
        self, registry: tuple[str, str], registration: Registration, on_drain: OnDrain = lambda: None
    ) -> RegistryGroup:
        """Be listed from now on, and know the others. `registry`: its name in the key directory, and its endpoint; or
        several as `registry_places` takes them, with the name of those that give none.

        The keyring is not reloaded: the registry tells the others this node's key.
        """
        try:
            places = registry_places(registry[1], registry[0])
        except ValueError as error:
            raise ControlError(f"registry: {error}") from None
        self.client = RegistryGroup(
            self.keyring,
            places,
            registration,
            on_directory=self._on_directory,
            on_departed=self._on_departed,
            on_drain=on_drain,
            on_discard=self._on_discard,
            report=self.watch.report,
            on_show=self.watch.recorder.show,
            on_membership=self._on_membership,
        )
        self.client.start()
        if self._member is not None:
            self._member.start(self._is_listed)
        return self.client

    def leave(self) -> None:
        """Deregister."""
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the registry notices by itself
                client.close()

    def end_store(self, timeout_s: float = STOP_S) -> None:
        """Ends all store operations and starts no new ones; the doorway and the store report them."""
        if self.store is not None:
            with contextlib.suppress(Exception):  # a stuck or dead loop performs no duties either
                self.loop.call(self.store.close).result(timeout_s)

    def stop(self, timeout_s: float = STOP_S) -> None:
        self.leave()
        if self._member is not None:
            self._member.close()
        self.loop.stop(timeout_s)
        self.watch.close()
        if self.store is not None:
            self.store.close()
        if self._links is not None:
            self._links.stop(timeout_s)

    # --- registration and peers

    def registration(self, http_address: str, modes: Sequence[str] = (), *, stays: bool = False) -> Registration:
        """How this engine presents itself to a registry. `stays`: its process does not end when it has drained.

        Without an HTTP address it is known to its peers, and no router asks it.
        """
        facts = self.facts
        return Registration(
            worker=facts.me.worker,
            incarnation=facts.me.incarnation,
            role=facts.role,
            http_address=http_address,
            control_endpoint=self.control.endpoint,
            modes=tuple(modes),
            transports=self.transports,
            compat_digest=compat_digest(facts.compat),
            tp_size=facts.tp_size,
            model=facts.model[-MODEL_CHARS_MAX:],
            host=boot_id(),
            stays=stays,
            dp_rank=facts.dp_rank,
            dp_size=facts.dp_size,
            born=self._born,
            continues=facts.continues,
            context_tokens=facts.context_tokens,
        )

    def know(
        self, directory: Mapping[WorkerId, tuple[str, str]], joined: Mapping[WorkerId, Membership] | None = None
    ) -> None:
        """These peers, at these endpoints under these keys, and no others. From any thread.

        An empty key stands for whichever the key directory gives by then. `joined`: who of them is a member by a
        certificate.
        """
        me = self.peer.worker
        others = {worker: address for worker, address in directory.items() if worker != me}
        self.book.replace({**{worker: endpoint for worker, (endpoint, _) in others.items()}, me: self.control.endpoint})
        self.control.set_directory(others, joined)

    def held(self) -> HeldReport:
        """What is held for others, and must end before this engine can leave without cost to them. Only reads
        lengths."""
        ledger = self.ledger
        return HeldReport(
            leases=len(ledger.producer.leases),
            intakes=len(ledger.consumer.by_handoff),
            claims=ledger.producer.claims.waiting,
        )

    def _on_directory(self, entries: Sequence[DirectoryEntry], joined: Mapping[WorkerId, Membership]) -> None:
        self.know(addresses(entries), joined)

    def _on_departed(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self.loop.tell(Departed(worker, incarnation))

    def _on_discard(self, tickets: Sequence[str]) -> None:
        for event in discarded(self.doorway, tickets):
            self.loop.tell(event)

    def _is_listed(self) -> bool:
        client = self.client
        return client is not None and client.state is MemberState.LISTED

    def _on_membership(self, certificate: bytes, card: bytes) -> None:
        """What a registry passed on. Who was removed counts for engines that have a key directory too: members that
        joined are in none of theirs."""
        if self._member is not None:
            self._member.take(certificate, card)
        if card:
            with contextlib.suppress(JoinFault):
                told = opened_card(card, self.keyring.admission)
                self.control.add_removed(map(WorkerId, told.removed), told.removed_keys)

    def _take_membership(self, keyring: Keyring) -> None:
        """From any thread."""
        self.control.set_keyring(keyring)
        if (client := self.client) is not None:
            client.set_keyring(keyring)

    def _take_keys(self, keyring: Keyring) -> None:
        for event in renewed_keys(self.node, self.keyring, keyring):
            self.loop.tell(event)
        self.keyring = keyring
        for take in self.on_keys:
            take(keyring)


def _identity(facts: EngineFacts, keyring: Keyring, ranks: Sequence[Rank]) -> Identity:
    """A transport that one rank lacks is not offered: a handoff needs it on all of them."""
    common = [name for name in ranks[0] if all(name in rank for rank in ranks)]
    return Identity(
        me=facts.me,
        host=boot_id(),
        compat=facts.compat,
        layout=facts.layout,
        transports=tuple(ranks[0][name].capabilities for name in common),
        ticket_keys=keyring.ticket_keys,
        wall_offset_s=time.time() - time.monotonic(),
        exact_epochs=facts.exact_epochs,
        role_of=keyring.role_of,
        origin_of=keyring.origin_of,
        is_gone=keyring.is_gone,
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def discarded(doorway: Doorway, tickets: Iterable[str]) -> Iterator[Discarded]:
    """Tickets that a router discarded, as events for the node that leased their blocks.

    Law: only a ticket signed by this cluster for this incarnation of this worker has an effect. An expired one has none
    either: its lease has expired too.
    """
    me = doorway.config.me
    for ticket in tickets:
        with contextlib.suppress(ProtocolError):
            opened = doorway.open_ticket(ticket)
            if opened.source == me.worker and opened.incarnation in (0, me.incarnation):
                yield Discarded(opened.handoff)


def renewed_keys(node: Node, before: Keyring, after: Keyring) -> list[Departed | MembersGone]:
    """Make `node` use the new ticket keys; returns the events for it. On the node's thread.

    Laws: a worker that was removed, or whose key has another role now, is gone for the node at once. Its control
    messages are refused; its leases and data connections must not outlive them. KV that came from a member that was
    removed, or may not grant any more, does not outlive it either (decision 0023).
    """
    identity = node.ledger.desk.identity
    identity.ticket_keys, identity.role_of = after.ticket_keys, after.role_of
    identity.origin_of, identity.is_gone = after.origin_of, after.is_gone
    node.doorway.config = msgspec.structs.replace(node.doorway.config, ticket_keys=after.ticket_keys)
    changed = [worker for worker in sorted(before.peers) if not _same(before, after, worker)]
    removed = after.removed_names.intersection(changed) | after.removed_names - before.removed_names
    lost = [worker for worker in changed if _grants(before, worker) and not _grants(after, worker)]
    events: list[Departed | MembersGone] = [Departed(worker) for worker in changed]
    # A member that only left is no reason: it may come back, and what it computed is as good as before.
    return [*events, MembersGone()] if removed or any(worker in after.peers for worker in lost) else events


def _grants(keyring: Keyring, worker: WorkerId) -> bool:
    return worker in keyring.peers and may(keyring.role_of(worker), Act.GRANT)


def _same(before: Keyring, after: Keyring, worker: WorkerId) -> bool:
    """Peers whose key or role changed must start anew."""
    return bool(_keys(before, worker) & _keys(after, worker)) and before.role_of(worker) is after.role_of(worker)


def _keys(keyring: Keyring, worker: WorkerId) -> set[str]:
    """None of its former keys is accepted: it was removed, also if the name was created again before we looked."""
    return {keyring.peers[worker], *keyring.also.get(worker, ())} if worker in keyring.peers else set()
