"""`"control_host": "auto"`: the address by which the rest of the cluster reaches this process.

Law: it is one numeric address of this host, never a wildcard or a name. What the platform says (POD_IP, VLLM_HOST_IP)
goes before what the routing table says; the latter is asked without a packet being sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping

from kvbaton.control.address_book import split_endpoint
from kvbaton.control.addressing import ControlError

ADDRESS_ENV = ("POD_IP", "VLLM_HOST_IP")


def own_address(field: str, towards: str, environ: Mapping[str, str] = os.environ) -> str:
    """`towards`: endpoint of a registry, or of anything else that peers are beside. `field` is for the error."""
    for name in ADDRESS_ENV:
        if text := environ.get(name, "").strip():
            return _numeric(field, name, text)
    if not towards:
        raise ControlError(f"{field}: auto needs POD_IP, VLLM_HOST_IP or a registry; give an address of this host")
    host, port = split_endpoint(towards)
    why = "no route"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ControlError(
            f"{field}: auto cannot find the registry {host} ({error}); set POD_IP, or give an address of this host"
        ) from None
    for family, kind, number, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, number) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    raise ControlError(f"{field}: auto found no way to {host} ({why}); set POD_IP, or give an address of this host")


def _numeric(field: str, name: str, text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ControlError(
            f"{field}: auto takes {name}, which is {text[:80]!r}; expected an address as numbers"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise ControlError(f"{field}: auto takes {name}, which is {text}; give the address by which peers reach it")
    return str(address)
