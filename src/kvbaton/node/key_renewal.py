"""Applies a changed key directory to a node: which keys sign and verify tickets now, and which peers are gone.

Laws: a worker that was removed, or whose key has another role now, is gone for the node at once. Its control messages
are refused; its leases and data connections must not outlive them. KV that came from a member that was removed, or may
not grant any more, does not outlive it either (decision 0023).
"""

from __future__ import annotations

import msgspec

from kvbaton.control.keyring import Keyring
from kvbaton.node.node import Node
from kvbaton.protocol.events import Departed, MembersGone
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.privileges import Act, may


def renewed_keys(node: Node, before: Keyring, after: Keyring) -> list[Departed | MembersGone]:
    """Make `node` use the new ticket keys; returns the events for it. On the node's thread."""
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
