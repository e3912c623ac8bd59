"""What becomes of a packet."""

from __future__ import annotations

import pytest

from kvbaton_proof.chaos.network.hub_policy import Switch, Wires
from kvbaton_proof.chaos.network.net_control import Ask, Cut, Heal, Mend, Reply, Slow, carry_out

WAY, BACK, OTHER = ("p0", "d0"), ("d0", "p0"), ("p0", "d1")
NAMES = ("client", "p0", "d0", "d1")


def switch(seed: int = 0, waiting_bytes_max: int = 1 << 20) -> Switch:
    return Switch(Wires(NAMES, seed), waiting_bytes_max)


def test_a_good_wire_passes_at_once_and_counts() -> None:
    hub = switch()
    assert hub.arrived(WAY, b"abc", 0.0)
    assert hub.next_due() is None
    assert (hub.counts[WAY].packets, hub.counts[WAY].payload_bytes, hub.counts[WAY].lost) == (1, 3, 0)


def test_a_cut_is_of_one_way_only() -> None:
    hub = switch()
    hub.wires.cut(WAY)
    assert not hub.arrived(WAY, b"abc", 0.0)
    assert hub.arrived(BACK, b"abc", 0.0)
    assert hub.arrived(OTHER, b"abc", 0.0)
    assert (hub.counts[WAY].packets, hub.counts[WAY].lost) == (0, 1)
    hub.wires.heal()
    assert hub.arrived(WAY, b"abc", 0.0)
    assert hub.due(1e9) == []  # what was lost stays lost


def test_delayed_packets_come_in_order_and_not_before_their_time() -> None:
    hub = switch()
    hub.wires.slow(WAY, 0.5, 0.0)
    assert not hub.arrived(WAY, b"1", 10.0)
    assert not hub.arrived(WAY, b"2", 10.0)
    assert not hub.arrived(WAY, b"3", 10.1)
    assert hub.next_due() == 10.5
    assert hub.due(10.49) == []
    assert hub.due(10.5) == [(WAY, b"1"), (WAY, b"2")]
    assert hub.due(11.0) == [(WAY, b"3")]
    assert hub.next_due() is None
    assert hub.counts[WAY].packets == 3


def test_a_cut_takes_what_is_under_way() -> None:
    hub = switch()
    hub.wires.slow(WAY, 0.5, 0.0)
    hub.arrived(WAY, b"1", 0.0)
    hub.wires.cut(WAY)
    assert hub.due(1.0) == []
    assert hub.counts[WAY].lost == 1
    hub.wires.mend(WAY)
    assert hub.wires.all_good


def test_a_slow_wire_that_is_cut_is_slow_again_only_when_told() -> None:
    wires = Wires(NAMES, 0)
    wires.cut(WAY)
    wires.slow(WAY, 0.1, 0.2)
    assert wires.get(WAY).cut and wires.get(WAY).loss == 0.2
    wires.mend(WAY)
    wires.slow(WAY, 0.1, 0.0)
    wires.slow(WAY, 0.0, 0.0)
    assert wires.all_good


def test_what_waits_is_bounded_and_room_comes_back() -> None:
    hub = switch(waiting_bytes_max=10)
    hub.wires.slow(WAY, 1.0, 0.0)
    hub.wires.slow(BACK, 1.0, 0.0)
    hub.arrived(WAY, bytes(6), 0.0)
    hub.arrived(BACK, bytes(6), 0.0)
    assert hub.counts[BACK].lost == 1
    assert hub.due(1.0) == [(WAY, bytes(6))]
    hub.arrived(BACK, bytes(10), 1.0)
    assert hub.due(2.0) == [(BACK, bytes(10))]


def lost(seed: int, *, noise: bool = False, way: tuple[str, str] = WAY) -> list[bool]:
    hub = switch(seed)
    hub.wires.slow(way, 0.0, 0.3)
    hub.wires.slow(OTHER, 0.0, 0.3)
    out = []
    for _ in range(1000):
        if noise:
            hub.arrived(OTHER, b"x", 0.0)
        out.append(not hub.arrived(way, b"x", 0.0))
    return out


def test_loss_is_the_seeds_and_of_each_way_its_own() -> None:
    assert lost(1) == lost(1, noise=True)
    assert lost(1) != lost(2)
    assert lost(1) != lost(1, way=BACK)
    assert 230 < sum(lost(1)) < 370


def test_a_loss_of_one_loses_all_and_of_none_nothing() -> None:
    hub = switch()
    hub.wires.slow(WAY, 0.0, 1.0)
    assert not any(hub.arrived(WAY, b"x", 0.0) for _ in range(100))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Cut("p0", "nobody"), "nobody"),
        (Cut("p0", "p0"), "itself"),
        (Slow("p0", "d0", -1.0, 0.0), "delay_s"),
        (Slow("p0", "d0", float("nan"), 0.0), "delay_s"),
        (Slow("p0", "d0", 0.0, 1.5), "loss"),
        (Mend("x", "d0"), "x"),
    ],
)
def test_what_cannot_be_done_is_said_by_name_and_changes_nothing(request_: Cut | Slow | Mend, field: str) -> None:
    wires = Wires(NAMES, 0)
    assert field in carry_out(request_, wires, {}).error
    assert wires.all_good


def test_requests_do_what_they_say() -> None:
    hub = switch()
    assert carry_out(Cut(*WAY), hub.wires, {}) == Reply()
    assert hub.wires.get(WAY).cut
    carry_out(Slow(*BACK, 0.5, 0.25), hub.wires, {})
    assert (hub.wires.get(BACK).delay_s, hub.wires.get(BACK).loss) == (0.5, 0.25)
    carry_out(Mend(*WAY), hub.wires, {})
    assert not hub.wires.get(WAY).cut
    carry_out(Heal(), hub.wires, {})
    assert hub.wires.all_good
    hub.arrived(WAY, b"abc", 0.0)
    assert carry_out(Ask(), hub.wires, hub.counts).counts["p0-d0"].payload_bytes == 3
