"""Where a registered worker may say that it is: the router sends HTTP there, and other members dial there.

Law: a member steers nobody. Without a list from the operator an address is the one that the member's connection to the
registry came from; of a member on the registry's own host, any of that host's. What serves no cluster (link-local,
multicast, a cloud's metadata) is refused whatever the list says, and so is where the router itself listens: it would
ask itself. A name could lead anywhere by the time it is used, so it is taken only where the operator takes any address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from kvbaton.control.addressing import host_of
from kvbaton.control.registry.registry_messages import Registration, RegistryFault

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

ANY = "any"
OPTION = "--worker-networks"
NETWORKS_MAX = 256
_NOBODYS = "is link-local, multicast, unspecified or a cloud's own; give the address by which others reach it"
_METADATA = tuple(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200")))
"""Where clouds tell secrets to whoever asks; the best known, 169.254.169.254, is link-local."""


class Networks(msgspec.Struct, frozen=True):
    """What the operator allows. Nothing given: what a member's own address implies."""

    listed: tuple[Network, ...] = ()
    takes_any: bool = False
    own: tuple[str, ...] = ()  # host:port, where the router itself listens

    def without(self, own: Iterable[str]) -> Networks:
        """The same, and nobody is at these addresses (`host:port`; 0.0.0.0 and [::] stand for all of this host's)."""
        return msgspec.structs.replace(self, own=tuple(own))

    @classmethod
    def parse(cls, text: str) -> Networks:
        """`10.1.0.0/16,fd12::/16`, or `any`; ValueError says what is wrong."""
        if text == ANY:
            return cls(takes_any=True)
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > NETWORKS_MAX:
            raise ValueError(f"{len(parts)} networks, at most {NETWORKS_MAX}")
        return cls(tuple(_network(part) for part in parts))

    def check(self, told: Registration, peer: str) -> None:
        """`RegistryFault` naming the address that this member may not have; `peer` is where it connects from."""
        if found := self._first(told, lambda host: self.why_not(host, peer)):
            raise RegistryFault(found)

    def elsewhere(self, told: Registration) -> str:
        """Why a member that registers with others may not be where it says; "" if it may. Where it connects from is not
        known here: what the operator lists counts, and what no worker may have."""

        def why_not(host: str) -> str:
            if self.listed or self.takes_any:
                return self.why_not(host, "")
            address = parsed(host)
            return _NOBODYS if address is not None and serves_nobody(address) else ""

        return self._first(told, why_not)

    def _first(self, told: Registration, why_not: Callable[[str], str]) -> str:
        for field, authority in (
            ("http_address", told.http_address),
            ("control_endpoint", told.control_endpoint.removeprefix("tcp://")),
        ):
            why = authority and (self._is_the_routers(authority) or why_not(host_of(authority)))
            if why:
                return f"{field}: {authority[:80]!r} {why}"
        return ""

    def _is_the_routers(self, authority: str) -> str:
        host, port = parsed(host_of(authority)), _port(authority)
        for own in self.own:
            at = parsed(host_of(own))
            if _port(own) != port or host is None or at is None:
                continue
            if host == at or (at.is_unspecified and (host.is_loopback or _is_own(host))):
                return "is the router's own; give the worker's, or choose another port"
        return ""

    def why_not(self, host: str, peer: str, is_own: Callable[[Address], bool] | None = None) -> str:
        """Why a member that connects from `peer` may not be at `host`; "" if it may."""
        is_own = is_own or _is_own
        address = parsed(host)
        if address is None:
            if self.takes_any and not _looks_numeric(host):
                return ""
            return (
                f"is a name or no address in the usual form; give an address, or start the router with {OPTION} {ANY}"
            )
        if serves_nobody(address):
            return _NOBODYS
        if self.takes_any or any(address in network for network in self.listed):
            return ""
        if self.listed:
            return f"is in none of the networks that the router allows; add its network to the router's {OPTION}"
        origin = parsed(peer)
        if origin is not None and _implied(address, origin, is_own):
            return ""
        seen = str(origin) if origin is not None else "an unknown address"
        return f"is not {seen}, from where it registers; allow its network with the router's {OPTION} CIDR"


def _port(authority: str) -> int:
    return int(authority.rpartition(":")[2])


def serves_nobody(address: Address) -> bool:
    """Whether no worker can be there, or none should."""
    broadcast = address == ipaddress.IPv4Address("255.255.255.255")
    odd = address.is_link_local or address.is_multicast or address.is_unspecified or broadcast
    return odd or address in _METADATA or (isinstance(address, ipaddress.IPv4Address) and address.packed[0] == 0)


def _implied(address: Address, peer: Address, is_own: Callable[[Address], bool]) -> bool:
    """Whether a member that connects from `peer` is believed to be at `address`: there, or both are of this host."""
    return address == peer or all(each.is_loopback or is_own(each) for each in (peer, address))


def _is_own(address: Address) -> bool:
    """Whether it is one of this host's: then the way there begins there. Nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return parsed(str(probe.getsockname()[0])) == address
    except OSError:
        return False


def parsed(text: str) -> Address | None:
    """An address as it is meant: of IPv4 in the clothes of IPv6, the inner one; None of a name."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if text.lower() == "localhost" else text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(address.packed[-4:])
        return inner or address
    return address


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _looks_numeric(host: str) -> bool:
    """Whether a resolver would read an address from it: 127.1, 0x7f000001, 2130706433."""
    last = host.rstrip(".").rpartition(".")[2]
    return last[:1].isdigit()


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"got {text[:60]!r}, expected networks as 10.1.0.0/16,fd12::/16, or {ANY}") from None
