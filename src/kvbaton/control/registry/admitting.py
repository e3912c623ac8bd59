"""What a registry adds to its answers in a cluster whose members may join: certificates, and the cluster's card.

Law: every entry of the directory has a certificate, of minted members too: one that joined has no other means to know
them. The ticket keys go to members that joined, over the connection of the key that the certificate names.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_messages import ClusterCard
from kvbaton.control.registry.registry_messages import Directory, RosterEntry
from kvbaton.protocol.ids import WorkerId


def certified(admission: Admission | None, directory: Directory) -> Directory:
    """The directory, with certificates."""
    if admission is None:
        return directory
    role_of = admission.keyring.role_of
    entries = tuple(
        msgspec.structs.replace(
            entry, certificate=admission.vouch(entry.worker, entry.public_key, role_of(entry.worker))
        )
        for entry in directory.entries
    )
    return msgspec.structs.replace(directory, entries=entries)


def membership(admission: Admission | None, worker: WorkerId, key: str) -> tuple[bytes, ClusterCard | None]:
    """What one that joined is told with every answer; nothing to others."""
    if admission is None or worker not in admission.keyring.joined:
        return b"", None
    return admission.vouch(worker, key, admission.keyring.role_of(worker)), admission.card()


def is_living(workers: Iterable[RosterEntry], name: str, key: str) -> bool:
    return any(entry.registration.worker == name and entry.public_key == key for entry in workers)
