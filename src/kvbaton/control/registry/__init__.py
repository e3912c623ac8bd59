"""Discovery: who is here, in which life, and how to reach it. Authenticated with the same keys as all control traffic.

A worker registers when it can serve, pings, and deregisters when it leaves, with each registry of its cluster; a
registry tells every worker about the others, and routers about all. It lives in a router or in a process of its own.
Losing all of them costs news, never service: workers and routers go on with the last list they had.
"""

from kvbaton.control.addressing import registry_places
from kvbaton.control.registry.allowed_networks import Networks
from kvbaton.control.registry.operator import OperatorLine
from kvbaton.control.registry.registry_client import RegistryClient
from kvbaton.control.registry.registry_group import RegistryGroup
from kvbaton.control.registry.registry_messages import (
    DirectoryEntry,
    DrainState,
    Registration,
    Role,
    RosterEntry,
    WorkerState,
    addresses,
)
from kvbaton.control.registry.registry_readers import RegistryReaders
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_server import RegistryServer
from kvbaton.control.registry.statements import HeldReport, MemberState

__all__ = [
    "DirectoryEntry",
    "DrainState",
    "HeldReport",
    "MemberState",
    "Networks",
    "OperatorLine",
    "Registration",
    "RegistryClient",
    "RegistryGroup",
    "RegistryReaders",
    "RegistryServer",
    "RegistrySettings",
    "Role",
    "RosterEntry",
    "WorkerState",
    "addresses",
    "registry_places",
]
