"""How much of the router one client may have: the books alone, without a connection."""

from __future__ import annotations

import random
import resource

import pytest

from kvbaton.api.http import client_quotas
from kvbaton.api.http.client_quotas import ADDRESS_SHARE, CONNECTIONS_MAX, ClientCrowd, ClientQuotas, Tab, caller

# --- bytes


def test_nobody_holds_more_than_is_left() -> None:
    books = ClientQuotas(1000)
    first, second, third = books.tab("a"), books.tab("b"), books.tab("c")
    assert first.hold(500) and not first.hold(501)
    assert second.hold(250) and not second.hold(251)
    assert third.hold(125)
    assert (books.bytes, first.bytes) == (875, 500)
    first.close()
    assert third.hold(375)
    for tab in (first, second, third):
        tab.close()
    assert books.bytes == 0 and not books._held


def test_what_one_address_holds_counts_together() -> None:
    books = ClientQuotas(1000)
    tab = books.tab("a")
    other = tab.another()
    assert tab.hold(300) and other.hold(200)
    assert not other.grow(1) and books._held == {"a": 500}
    tab.absorb(other)
    assert (tab.bytes, other.bytes, books.bytes) == (500, 0, 500)
    other.close()
    assert books.bytes == 500


def test_less_can_always_be_held() -> None:
    books = ClientQuotas(1000)
    tab = books.tab("a")
    assert tab.hold(500) and books.tab("b").hold(250)
    assert tab.hold(499) and not tab.hold(501)


def test_whatever_is_held_and_given_back_the_books_are_right() -> None:
    rng = random.Random(7)
    books = ClientQuotas(10_000)
    tabs = [books.tab(rng.choice("abcd")) for _ in range(40)]
    for _ in range(5000):
        tab = rng.choice(tabs)
        before = tab.bytes
        wanted = rng.randrange(2000)
        fits = tab.hold(wanted)
        assert tab.bytes == (wanted if fits else before)
        assert books.bytes == sum(each.bytes for each in tabs) <= 10_000
        for who in "abcd":
            assert books._held.get(who, 0) == sum(each.bytes for each in tabs if each._who == who)
    for tab in tabs:
        tab.close()
    assert books.bytes == 0 and not books._held


def test_a_refusal_names_the_bound_and_what_to_do_and_is_counted() -> None:
    books = ClientQuotas(1000)
    fault = books.full("answer")
    assert (fault.status, fault.code, fault.retry_after_s) == (503, "no_room", 1)
    assert fault.message.startswith("answer: ") and "1000 (--held-bytes-max)" in fault.message
    assert "try again later" in fault.message and books.refused == {"answer": 1}


@pytest.mark.parametrize(
    ("peer", "who"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a:b", "a:b"),
        ("", ""),
    ],
)
def test_a_network_of_ipv6_is_one_client(peer: str, who: str) -> None:
    assert caller(peer) == who


# --- connections


@pytest.mark.parametrize(
    ("soft", "clients"),
    [
        (1024, 298),
        (256, 42),
        (64, 16),
        (20_000, 6624),
        (1 << 20, CONNECTIONS_MAX),
        (resource.RLIM_INFINITY, CONNECTIONS_MAX),
    ],
)
def test_clients_have_a_third_of_the_descriptors(soft: int, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_quotas.resource, "getrlimit", lambda _: (soft, soft))
    assert client_quotas.connections_max() == clients
    assert client_quotas.descriptors() - client_quotas.connections_max() >= 2 * clients


def test_the_oldest_idle_one_is_the_next_to_go() -> None:
    crowd: ClientCrowd[int] = ClientCrowd(100)
    for number in range(4):
        crowd.enter(number, str(number))
    crowd.busy(0)
    assert crowd.next_to_go("x") == 1
    crowd.busy(1)
    crowd.idle(1)  # was answered just now
    assert crowd.next_to_go("x") == 2
    crowd.leave(2)
    crowd.leave(2)
    crowd.idle(2)
    assert (crowd.next_to_go("x"), len(crowd), list(crowd)) == (3, 3, [0, 1, 3])
    for number in (1, 3):
        crowd.busy(number)
    assert crowd.next_to_go("x") is None
    for number in (0, 1, 3):
        crowd.leave(number)
    assert not (crowd._idle or crowd._idle_of or crowd._count or crowd._of)


def test_an_address_with_its_share_of_all_makes_room_itself() -> None:
    crowd: ClientCrowd[str] = ClientCrowd(4 * ADDRESS_SHARE)
    crowd.enter("client", "c")
    for number in range(3):
        crowd.enter(f"s{number}", "s")
    assert crowd.next_to_go("s") == "client"
    crowd.enter("s3", "s")
    assert crowd.next_to_go("s") == "s0"
    assert crowd.next_to_go("c") == "client"
    for number in range(4):
        crowd.busy(f"s{number}")
    assert crowd.next_to_go("s") == "client"


def test_a_tab_is_small() -> None:
    assert not hasattr(Tab(ClientQuotas(), ""), "__dict__")
