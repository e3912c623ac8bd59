"""Applies a changed key directory to a node: which keys sign and verify tickets now, and which peers are gone.

Law: a worker that was removed, or whose key has another role now, is gone for the node at once. Its control messages
are refused; its leases and data connections must not outlive them.
"""

from __future__ import annotations

import msgspec

from kvbaton.control.keyring import Keyring
from kvbaton.node.node import Node
from kvbaton.protocol.events import Departed
from kvbaton.protocol.ids import WorkerId


def renewed_keys(node: Node, before: Keyring, after: Keyring) -> list[Departed]:
    """Make `node` use the new ticket keys; returns the events for it. On the node's thread."""
    identity = node.ledger.desk.identity
    identity.ticket_keys, identity.role_of = after.ticket_keys, after.role_of
    node.doorway.config = msgspec.structs.replace(node.doorway.config, ticket_keys=after.ticket_keys)
    return [Departed(worker) for worker in sorted(before.peers) if not _same(before, after, worker)]


def _same(before: Keyring, after: Keyring, worker: WorkerId) -> bool:
    """Peers whose key or role changed must start anew."""
    return bool(_keys(before, worker) & _keys(after, worker)) and before.role_of(worker) is after.role_of(worker)


def _keys(keyring: Keyring, worker: WorkerId) -> set[str]:
    """None of its former keys is accepted: it was removed, also if the name was created again before we looked."""
    return {keyring.peers[worker], *keyring.also.get(worker, ())} if worker in keyring.peers else set()
