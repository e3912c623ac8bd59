"""What is claimed of the data planes is judged by the figures."""

from __future__ import annotations

import pytest

from kvbaton_proof.bench.kit.lab_pages import check
from kvbaton_proof.bench.transfer.transfer_checks import is_delicate, judge, judge_idle

GOOD = {
    ("shm_2_threads", "memcpy"): 0.9,
    ("shm_2_threads", "nixl"): 3.0,
    ("shm_2_threads", "nixl_2_threads"): 2.0,
    ("shm_2_threads", "nixl_no_thread"): 2.5,
    ("shm_2_threads", "mooncake"): 9.0,
    ("tcp", "nixl_tcp"): 1.3,
    ("tcp", "nixl_tcp_spin"): 1.1,
    ("tcp", "mooncake"): 3.0,
    ("kvbaton_nixl", "nixl"): 0.95,
    ("kvbaton_nixl_tcp", "nixl_tcp"): 1.0,
}


def failed(changes: dict[tuple[str, str], float], peers: tuple[str, ...] = ("nixl", "mooncake")) -> list[str]:
    figures = {**GOOD, **changes}
    return [each.name for each in judge(lambda way, base: figures[way, base], peers, 16384) if not each.ok]


def test_figures_at_their_bounds_hold() -> None:
    assert failed({}) == []


@pytest.mark.parametrize(
    ("pair", "value", "name"),
    [
        (("shm_2_threads", "memcpy"), 0.89, "shm / memcpy at 16 KiB"),
        (("shm_2_threads", "nixl_2_threads"), 1.0, "shm / nixl at 16 KiB"),
        (("shm_2_threads", "mooncake"), 0.9, "shm / mooncake at 16 KiB"),
        (("tcp", "nixl_tcp_spin"), 1.0, "tcp / nixl over tcp at 16 KiB"),
        (("tcp", "mooncake"), 0.99, "tcp / mooncake over tcp at 16 KiB"),
        (("kvbaton_nixl", "nixl"), 0.949, "kvbaton_nixl / nixl at 16 KiB"),
        (("kvbaton_nixl_tcp", "nixl_tcp"), 0.9, "kvbaton_nixl_tcp / nixl_tcp at 16 KiB"),
    ],
)
def test_one_figure_too_low_fails_its_claim_alone(pair: tuple[str, str], value: float, name: str) -> None:
    assert failed({pair: value}) == [name]


def test_a_library_is_as_fast_as_its_fastest_way() -> None:
    found = judge(lambda way, base: GOOD[way, base], ("nixl",), 16384)
    assert [each.value for each in found] == [0.9, 2.0, 1.1, 0.95, 1.0]
    assert found[2].ways == ("tcp", "nixl_tcp", "nixl_tcp_spin")


def test_without_peers_nothing_is_claimed() -> None:
    assert judge(lambda *_: 0.0, (), 16384) == []


def test_noise_can_decide_what_is_near_its_bound_or_about_a_few_percent() -> None:
    delicate = [is_delicate(check("x", value, ">=", 1.0)) for value in (0.84, 0.86, 1.14, 1.16)]
    assert delicate == [False, True, True, False]
    found = judge(lambda way, base: 5.0, ("nixl",), 16384)
    assert [each.ways[0] for each in found if is_delicate(each)] == ["kvbaton_nixl", "kvbaton_nixl_tcp"]


def test_a_transport_that_uses_two_percent_of_a_core_is_not_idle() -> None:
    assert [each.ok for each in judge_idle({"shm": 0.0, "nixl": 1.9, "tcp": 2.0})] == [True, True, False]
