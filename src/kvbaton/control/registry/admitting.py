"""What a registry adds to its answers in a cluster whose members may join: certificates, and the cluster's card.

Law: every entry of the directory has a certificate, of minted members too: one that joined has no other means to know
them. The ticket keys go to members that joined, over the connection of the key that the certificate names.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_messages import ClusterCard
from kvbaton.control.registry.registry_messages import Directory, DirectoryEntry, Roster, RosterEntry
from kvbaton.protocol.ids import WorkerId


def certified(admission: Admission | None, directory: Directory) -> Directory:
    """The directory, with certificates."""
    if admission is None:
        return directory
    entries = tuple(msgspec.structs.replace(each, certificate=_of(admission, each)) for each in directory.entries)
    return msgspec.structs.replace(directory, entries=entries)


def vouched(admission: Admission | None, roster: Roster) -> Roster:
    """The roster, with the certificates of those who joined: a router on another host may not know them."""
    if admission is None:
        return roster
    entries = tuple(
        msgspec.structs.replace(each, certificate=_of(admission, each))
        if each.worker in admission.keyring.joined else each
        for each in roster.entries
    )  # fmt: skip
    return msgspec.structs.replace(roster, entries=entries)


def _of(admission: Admission, entry: DirectoryEntry | RosterEntry) -> bytes:
    return admission.vouch(entry.worker, entry.public_key, admission.keyring.role_of(entry.worker))


def membership(admission: Admission | None, worker: WorkerId, key: str) -> tuple[bytes, ClusterCard | None, bytes]:
    """What a worker is told with every answer: one that joined its certificate and the card, others who was removed."""
    if admission is None:
        return b"", None, b""
    joined = admission.keyring.joined.get(worker)
    if joined is None:
        return b"", None, admission.signed_card() if admission.keyring.removed else b""
    # One of a release that did not sign reads the card as it is, and believes a registry.
    plain = None if joined.signing else msgspec.structs.replace(admission.card(), removed=(), removed_keys=())
    return admission.vouch(worker, key, admission.keyring.role_of(worker)), plain, admission.signed_card()


def is_living(workers: Iterable[RosterEntry], name: str, key: str) -> bool:
    return any(entry.registration.worker == name and entry.public_key == key for entry in workers)
