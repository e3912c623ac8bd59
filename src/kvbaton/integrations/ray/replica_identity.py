"""A replica's own place in the cluster: n replicas start from one configuration, and each must be somebody else.

Laws: a name is drawn anew in every life of a replica; the rank that Ray gives is none, since ranks of living replicas
are reassigned. What the operator wrote into `kv_connector_extra_config` stays; a field that cannot be the same for all
replicas is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvbaton.control.joining.join_client import AUTO, BASE_ENV, auto_name

FIELD = "kv_connector_extra_config"
OWN = ("name", "keys", "peers", "control_port", "http_address")
"""What each replica has for itself."""
RaySide = Literal["prefill", "decode"]
KV_ROLES: Mapping[RaySide, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


def replica_name(side: RaySide, replica_tag: str) -> str:
    """`prefill-k3x9a7bq-tail`: what Ray calls the replica, so that logs can be joined, and a random tail."""
    return auto_name(environ={BASE_ENV[0]: f"{side}-{replica_tag}"})


def side_of(transfer: Mapping[str, Any]) -> RaySide:
    """What a deployment is for, from its `kv_transfer_config`."""
    role = transfer.get("kv_role")
    for side, name in KV_ROLES.items():
        if role == name:
            return side
    raise ValueError(f"kv_transfer_config.kv_role: got {role!r}, expected one of {', '.join(KV_ROLES.values())}")


def check_shared(extra: Mapping[str, Any]) -> None:
    """What is given to all replicas alike; ValueError names the field that cannot be."""
    for field in OWN:
        if field in extra:
            raise ValueError(f"{FIELD}.{field}: each replica makes its own; leave it out, and give a join token")
    if not extra.get("registry"):
        raise ValueError(f"{FIELD}.registry: missing; replicas join there: tcp://host:port of a kvbaton registry")


def joined(extra: Mapping[str, Any], side: RaySide, replica_tag: str) -> dict[str, Any]:
    """`kv_connector_extra_config` of one replica; its engine joins the registry by it."""
    check_shared(extra)
    own = {"name": replica_name(side, replica_tag), "http_address": "", "named_pairs": True}
    return {"control_host": AUTO, **extra, **own}
