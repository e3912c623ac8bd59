"""Where a member may say that it is: by the address that it connects from, or by the operator's list."""

from __future__ import annotations

import ipaddress

import msgspec
import pytest

from kvbaton.control.registry import MemberState, RegistryServer, allowed_networks
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.allowed_networks import Networks

from ..rig import Post, posted, until
from .town import CALM, RINGS, ROUTER, Town, reg

OWN = tuple(map(ipaddress.ip_address, ("10.0.0.5", "fd12::5", "203.0.113.5")))


def is_own(address: allowed_networks.Address) -> bool:
    return address.is_loopback or address in OWN


def may(host: str, peer: str, allowed: str = "") -> bool:
    return not (Networks.parse(allowed) if allowed else Networks()).why_not(host, peer, is_own)


@pytest.mark.parametrize(
    ("peer", "fits", "fits_not"),
    [
        ("127.0.0.1", ["127.0.0.1", "127.0.0.9", "::1", "localhost", "10.0.0.5"], ["10.0.0.6", "8.8.8.8", "fd12::6"]),
        ("::1", ["127.0.0.1", "fd12::5"], ["192.168.1.1"]),
        ("10.0.0.5", ["127.0.0.1", "10.0.0.5", "fd12::5", "localhost"], ["10.0.0.6", "8.8.8.8"]),
        ("10.0.0.6", ["10.0.0.6", "::ffff:10.0.0.6"],
         ["10.0.0.7", "10.9.9.9", "172.16.0.1", "192.168.0.1", "100.64.0.1", "fd12::6",
          "127.0.0.1", "::1", "localhost", "10.0.0.5", "8.8.8.8", "172.32.0.1", "2001:db8::1"]),
        ("::ffff:10.0.0.6", ["10.0.0.6"], ["::ffff:10.0.0.7", "::ffff:127.0.0.1", "::ffff:8.8.8.8"]),
        ("fd12::6", ["fd12::6"], ["fd99::1", "10.0.0.6", "::1", "2001:db8::1", "fd12::5"]),
        ("203.0.113.9", ["203.0.113.9"], ["203.0.113.10", "10.0.0.6", "127.0.0.1", "203.0.113.5"]),
        ("", [], ["10.0.0.6", "127.0.0.1"]),
        ("nonsense", [], ["10.0.0.6", "127.0.0.1"]),
    ],
)  # fmt: skip
def test_an_address_is_the_one_that_the_member_connects_from(peer: str, fits: list[str], fits_not: list[str]) -> None:
    assert [host for host in (*fits, *fits_not) if may(host, peer)] == fits


NOWHERE = [
    "169.254.169.254", "169.254.0.1", "fe80::1", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200",
    "0.0.0.0", "::", "0.0.0.1", "224.0.0.1", "ff02::1", "255.255.255.255", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::",
]  # fmt: skip


@pytest.mark.parametrize("host", NOWHERE)
@pytest.mark.parametrize("allowed", ["", "any", "0.0.0.0/0,::/0"])
def test_what_serves_no_cluster_is_refused_whatever_the_list_says(host: str, allowed: str) -> None:
    assert not any(may(host, peer, allowed) for peer in ("127.0.0.1", "10.0.0.6", "fd12::6", host))


@pytest.mark.parametrize("host", ["p0.cluster.local", "metadata.google.internal", "evil.example", "p0"])
def test_a_name_is_taken_only_where_any_address_is(host: str) -> None:
    assert not may(host, "10.0.0.6") and not may(host, "10.0.0.6", "10.0.0.0/8")
    assert may(host, "10.0.0.6", "any")


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "169.254.169.254.", "10.0.0.06"])
def test_a_number_that_only_a_resolver_reads_as_an_address_is_refused(host: str) -> None:
    assert not any(may(host, "127.0.0.1", allowed) for allowed in ("", "any", "0.0.0.0/0"))


def test_a_list_replaces_what_the_members_address_implies() -> None:
    allowed = "10.1.0.0/16, fd12::/16"
    assert may("10.1.2.3", "203.0.113.9", allowed) and may("fd12::7", "", allowed)
    assert not may("10.2.2.3", "10.2.2.3", allowed) and not may("127.0.0.1", "127.0.0.1", allowed)


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "all", "10.0.0.0/33", "10.0.0.0/8,", "any,10.0.0.0/8"])
def test_a_list_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected networks as"):
        Networks.parse(text)


def test_a_list_has_an_end() -> None:
    with pytest.raises(ValueError, match="at most 256"):
        Networks.parse(",".join(["10.0.0.0/8"] * 257))


def test_this_host_knows_its_own_addresses() -> None:
    assert allowed_networks._is_own(ipaddress.ip_address("127.0.0.1"))
    assert not allowed_networks._is_own(ipaddress.ip_address("192.0.2.1"))
    assert not allowed_networks._is_own(ipaddress.ip_address("2001:db8::1"))


STEERED = {
    "http_address": ["169.254.169.254:80", "10.99.0.1:8000", "8.8.8.8:443", "metadata.google.internal:80", "127.1:80"],
    "control_endpoint": ["tcp://169.254.169.254:80", "tcp://10.99.0.1:8000", "tcp://[fe80::1]:80", "tcp://8.8.8.8:1"],
}


def test_a_member_cannot_have_the_router_or_others_dial_elsewhere() -> None:
    town = Town()
    tried = [(field, value) for field, values in STEERED.items() for value in values]
    with town.stack, posted(liar := Post(RINGS["d1"], bind=None)):
        liar.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        for field, value in tried:
            told = msgspec.structs.replace(reg("d1"), **{field: value})
            liar.control.send(ROUTER, m.encode(m.Register(told)))
        until(lambda: len(liar.inbox) == len(tried), liar)
        answers = [m.decode_from_registry(frame) for _, frame in liar.inbox]
        assert town.server.workers() == () and not any(town.changes)
    for (field, value), answer in zip(tried, answers, strict=True):
        assert isinstance(answer, m.RegistryRefused) and answer.detail.startswith(
            f"{field}: '{value.removeprefix('tcp://')}'"
        )
        assert "--worker-networks" in answer.detail or "link-local" in answer.detail


def test_a_listed_worker_cannot_move_elsewhere() -> None:
    town = Town()
    with town.stack, posted(liar := Post(RINGS["d1"], bind=None)):
        liar.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        good = reg("d1")
        liar.control.send(ROUTER, m.encode(m.Register(good)))
        until(town.server.workers, liar)
        liar.control.send(ROUTER, m.encode(m.Register(msgspec.structs.replace(good, http_address="10.99.0.1:80"))))
        until(lambda: town.server.counters["bad_messages"] == 1, liar)
        assert [entry.registration for entry in town.server.workers()] == [good]


def test_a_worker_in_a_network_that_the_operator_allows_is_listed() -> None:
    town = Town()
    with town.stack:
        allowed = Networks.parse("10.99.0.0/16")
        server = RegistryServer(RINGS["router"], settings=CALM, networks=allowed)
        server.start()
        town.stack.callback(server.close)
        town.server = server
        told = msgspec.structs.replace(reg("d0"), http_address="10.99.0.1:80", control_endpoint="tcp://10.99.0.1:81")
        d0 = town.worker(told)
        until(lambda: d0.client.state is MemberState.LISTED)
        refused = town.worker(reg("p0"))
        until(lambda: refused.client.state is MemberState.REFUSED)


@pytest.mark.parametrize(
    ("own", "told", "is_refused"),
    [
        ("0.0.0.0:8000", "127.0.0.1:8000", True),
        ("0.0.0.0:8000", "localhost:08000", True),
        ("[::]:8000", "127.0.0.9:8000", True),
        ("127.0.0.1:8000", "[::ffff:127.0.0.1]:8000", True),
        ("0.0.0.0:8000", "127.0.0.1:8001", False),
        ("127.0.0.1:8000", "127.0.0.2:8000", False),
    ],
)
def test_no_worker_is_where_the_router_listens(own: str, told: str, is_refused: bool) -> None:
    """The router would ask itself, and each of these requests again."""
    town = Town()
    town.server.refuse([own])
    with town.stack, posted(p0 := Post(RINGS["p0"], bind=None)):
        p0.control.set_directory({ROUTER: (town.server.endpoint, RINGS["router"].public)})
        p0.control.send(ROUTER, m.encode(m.Register(msgspec.structs.replace(reg("p0"), http_address=told))))
        until(lambda: p0.inbox, p0)
        answer = m.decode_from_registry(p0.inbox[0][1])
    assert isinstance(answer, m.RegistryRefused) == is_refused
    assert not is_refused or (answer.detail.startswith("http_address: ") and "the router's own" in answer.detail)
