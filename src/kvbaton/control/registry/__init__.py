"""Discovery: who is here, in which life, and how to reach it. Authenticated with the same keys as all control traffic.

A worker registers when it can serve, pings, and deregisters when it leaves; the router's registry tells every worker
about the others. Losing the registry costs news, never service: workers go on with the last directory they had.
"""

from kvbaton.control.registry.allowed_networks import Networks
from kvbaton.control.registry.member import MemberState
from kvbaton.control.registry.operator import OperatorLine
from kvbaton.control.registry.registry_client import RegistryClient
from kvbaton.control.registry.registry_messages import (
    DirectoryEntry,
    DrainState,
    HeldReport,
    Registration,
    Role,
    addresses,
)
from kvbaton.control.registry.registry_roster import RegistrySettings, RosterEntry, WorkerState
from kvbaton.control.registry.registry_server import RegistryServer

__all__ = [
    "DirectoryEntry",
    "DrainState",
    "HeldReport",
    "MemberState",
    "Networks",
    "OperatorLine",
    "Registration",
    "RegistryClient",
    "RegistryServer",
    "RegistrySettings",
    "Role",
    "RosterEntry",
    "WorkerState",
    "addresses",
]
