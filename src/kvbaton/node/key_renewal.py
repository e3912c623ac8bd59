"""A node whose key directory changed: which keys sign and verify tickets now, and whom it no longer knows.

Law: a worker that was taken off the list, or whose key has another role now, is gone for the node at once. Its control
messages are no longer heard; what it holds, and its data connections, must not outlive them.
"""

from __future__ import annotations

import msgspec

from kvbaton.control.keyring import Keyring
from kvbaton.node.node import Node
from kvbaton.protocol.events import Departed
from kvbaton.protocol.ids import WorkerId


def renewed_keys(node: Node, before: Keyring, after: Keyring) -> list[Departed]:
    """Have `node` use the new ticket keys; returns what it must be told. On the node's thread."""
    identity = node.ledger.desk.identity
    identity.ticket_keys, identity.role_of = after.ticket_keys, after.role_of
    node.doorway.config = msgspec.structs.replace(node.doorway.config, ticket_keys=after.ticket_keys)
    return [Departed(worker) for worker in sorted(before.peers) if not _same(before, after, worker)]


def _same(before: Keyring, after: Keyring, worker: WorkerId) -> bool:
    """Whoever has another key, or another role, than it had has to begin anew."""
    return bool(_keys(before, worker) & _keys(after, worker)) and before.role_of(worker) is after.role_of(worker)


def _keys(keyring: Keyring, worker: WorkerId) -> set[str]:
    """None that it had is let in: it was taken off, also if one of that name was minted anew before we looked."""
    return {keyring.peers[worker], *keyring.also.get(worker, ())} if worker in keyring.peers else set()
