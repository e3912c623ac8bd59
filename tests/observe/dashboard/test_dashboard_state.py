"""What a browser is given: complete for a small cluster, bounded for any."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.observe.dashboard import state
from kvbaton.observe.dashboard.pulse import Failure, Figures, MovingHandoff, Pulse, Scene, SeenHandoff
from kvbaton.observe.dashboard.state import (
    DOTS_MAX,
    FAILURES_MAX,
    LINKS_MAX,
    STATE_BYTES_MAX,
    WORKERS_MAX,
    build,
    encode,
)
from kvbaton.observe.flight.flight_records import STAGES

NOW = 1_800_000_000.0


def built(scene: Scene, pulse: Pulse | None = None) -> dict[str, Any]:
    """As the browser reads it."""
    found: dict[str, Any] = msgspec.json.decode(encode(build(scene, pulse or Pulse())))
    return found


def two_by_two(**rates: float) -> list[SeenHandoff]:
    sources = [SeenHandoff(name, "prefill", "ready", gauges={"pins": 3.0, "leases_held": 2.0}) for name in ("p0", "p1")]
    links = {"p0": "shm", "p1": "tcp"}
    return [*sources, *(SeenHandoff(name, "decode", "ready", rates=rates, links=links) for name in ("d0", "d1"))]


def test_an_empty_cluster_is_a_state_too() -> None:
    found = built(Scene(at=NOW))
    assert found["workers"] == found["links"] == found["failures"] == found["ended"] == []
    assert found["now"]["delivered"] is None
    assert [stage["name"] for stage in found["stages"]] == list(STAGES)
    assert all(stage["p50_ms"] is None for stage in found["stages"])


def test_workers_links_and_what_they_keep_are_told() -> None:
    found = built(Scene(at=NOW, workers=two_by_two(), pairs={("p0", "d1"): (20, 400)}))
    assert [worker["name"] for worker in found["workers"]] == ["p0", "p1", "d0", "d1"]
    assert (found["workers"][0]["pins"], found["workers"][0]["leases"]) == (3.0, 2.0)
    assert found["links_all"] == 4
    busiest = found["links"][0]
    assert (busiest["from"], busiest["to"], busiest["transport"], busiest["handoffs_s"]) == (0, 3, "shm", 2.0)


def test_bytes_are_shared_out_by_the_tokens_that_went_each_way() -> None:
    pairs = {("p0", "d0"): (1, 300), ("p1", "d0"): (1, 100)}
    workers = [*two_by_two()[:2], SeenHandoff("d0", "decode", "ready", rates={"bytes_total": 4000.0})]
    found = built(Scene(at=NOW, workers=workers, pairs=pairs))
    assert [(link["from"], link["bytes_s"]) for link in found["links"]] == [(0, 3000), (1, 1000)]


def test_bytes_that_p_wrote_itself_are_on_its_links() -> None:
    workers = [SeenHandoff("p0", "prefill", "ready", rates={"bytes_total": 900.0}), *two_by_two()[2:]]
    found = built(Scene(at=NOW, workers=workers, pairs={("p0", "d0"): (2, 20), ("p0", "d1"): (1, 10)}))
    assert [(link["to"], link["bytes_s"]) for link in found["links"] if link["from"] == 0] == [(1, 600), (2, 300)]


def test_a_worker_that_tells_nothing_is_called_silent() -> None:
    workers = [SeenHandoff("p0", "prefill", "ready", heard_s=12.0), SeenHandoff("d0", "decode", "ready", heard_s=0.4)]
    workers.append(SeenHandoff("foreign", "decode", "ready"))
    by_name = {worker["name"]: worker for worker in built(Scene(at=NOW, workers=workers))["workers"]}
    assert by_name["p0"]["silent"] is True
    assert by_name["d0"]["silent"] is False
    assert "silent" not in by_name["foreign"]  # it never told anything


def test_what_a_silent_worker_did_last_is_not_what_it_does() -> None:
    rates = {"handoffs_total": 5.0, "bytes_total": 4000.0}
    for heard_s, expected in ((state.SILENT_S - 0.1, (5.0, 4000)), (state.SILENT_S, (0.0, 0))):
        workers = [
            SeenHandoff("p0", "prefill", "ready"),
            SeenHandoff("d0", "decode", "ready", heard_s=heard_s, rates=rates),
        ]
        found = built(Scene(at=NOW, workers=workers, pairs={("p0", "d0"): (10, 100)}))
        assert (found["workers"][1]["handoffs_s"], found["workers"][1]["bytes_s"]) == expected
        assert found["links"][0]["bytes_s"] == expected[1]


def test_failures_that_one_side_alone_saw_count_and_those_of_both_count_once() -> None:
    pulse = Pulse()
    pulse.ended(NOW - 9, 10, 1)
    for _ in range(3):
        pulse.lost(NOW - 9)
    found = built(Scene(at=NOW), pulse)["now"]
    assert (found["ended"], found["failed"], found["delivered"]) == (12, 3, 0.75)


def test_figures_of_the_last_minute() -> None:
    pulse = Pulse()
    pulse.ended(NOW - 100, 50, 50)  # before
    for n in range(100):
        pulse.ended(NOW - 50 + n / 4, 1, int(n < 5))
        pulse.first_byte(NOW - 50 + n / 4, 0.010 + n / 10_000)
        pulse.staged(NOW - 50 + n / 4, {"copy": 0.004})
    found = built(Scene(at=NOW, own=Figures(7)), pulse)
    assert found["now"]["delivered"] == 0.95
    assert found["now"]["ended"] == 100
    assert found["now"]["in_flight"] == 7
    assert 10.0 <= found["now"]["ttft_p50_ms"] <= found["now"]["ttft_p99_ms"] <= 20.0
    copy = next(stage for stage in found["stages"] if stage["name"] == "copy")
    assert copy == {"name": "copy", "p50_ms": 4.0, "p95_ms": 4.0, "count": 100}


HUGE = "\x00\u2028é<script>" * 40


def crowd(count: int, name: str = "worker-{}") -> list[SeenHandoff]:
    gauges = dict.fromkeys(state._GAUGES.values(), 123456.789)
    links = {name.format(n): HUGE for n in range(40)}
    roles = ("prefill", "decode")
    return [
        SeenHandoff(name.format(n), roles[n % 2], "ready", "f" * 40, 1.0, gauges, {"bytes_total": 1e9}, links, HUGE)
        for n in range(count)
    ]


def test_500_workers_and_100_000_flights_stay_within_the_bytes() -> None:
    workers = crowd(500)
    names = [worker.name for worker in workers]
    pairs = {(names[n % 250 * 2], names[n // 250 * 2 + 1]): (n, n) for n in range(60_000)}
    moving = [MovingHandoff(n + 1, names[0], names[1], end="ok") for n in range(100_000)]
    waiting = [MovingHandoff(0, names[0], names[1], stage="handoff", key=HUGE) for _ in range(100_000)]
    failures = [Failure(NOW, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE) for _ in range(10_000)]
    scene = Scene(at=NOW, workers=workers, pairs=pairs, ended=moving, under_way=waiting, failures=failures)
    data = encode(build(scene, Pulse()))
    found = msgspec.json.decode(data)
    assert len(data) <= STATE_BYTES_MAX
    assert found["workers_all"] == 500
    assert len(found["workers"]) <= WORKERS_MAX
    assert found["links_all"] > LINKS_MAX >= len(found["links"])
    assert len(found["ended"]) <= DOTS_MAX
    assert len(found["failures"]) <= FAILURES_MAX


def test_without_odd_names_nothing_is_cut_from_a_full_state() -> None:
    workers = [SeenHandoff(f"worker-{n}", ("prefill", "decode")[n % 2], "ready", "f" * 16, 1.0) for n in range(64)]
    names = [worker.name for worker in workers]
    pairs = {(names[n % 32 * 2], names[n // 32 * 2 + 1]): (n, n) for n in range(1024)}
    ids = "0123456789abcdef" * 2
    moving = [MovingHandoff(n + 1, names[0], names[1], end="ok", key=f"{ids}#0@1800000000.123456") for n in range(60)]
    failures = [Failure(NOW, "claim_timeout", ids, ids, ids, "p0", "d0", "d0", "pull", "shm", "x" * 160)] * 30
    scene = Scene(at=NOW, workers=workers, pairs=pairs, ended=moving, under_way=moving, failures=failures)
    found = built(scene)
    assert "cut" not in found
    assert (len(found["workers"]), len(found["links"]), len(found["ended"]), len(found["failures"])) == (64, 64, 60, 30)


def test_what_is_too_much_is_cut_and_the_page_is_told() -> None:
    workers = [msgspec.structs.replace(each, note="\x00" * 500) for each in crowd(64, "\x00" * 60 + "{}")]
    data = encode(build(Scene(at=NOW, workers=workers), Pulse()))
    assert len(data) <= STATE_BYTES_MAX
    assert msgspec.json.decode(data)["cut"]


def test_dots_of_workers_that_are_not_drawn_are_not_drawn() -> None:
    moving = [MovingHandoff(1, "p0", "d0"), MovingHandoff(2, "nobody", "d0"), MovingHandoff(3, "p0", "nobody")]
    found = built(Scene(at=NOW, workers=two_by_two(), ended=moving))
    assert [dot["n"] for dot in found["ended"]] == [1]


@pytest.mark.parametrize(("sources", "targets"), [(400, 100), (100, 400), (490, 10), (10, 490), (500, 0)])
def test_the_room_is_shared_between_roles(sources: int, targets: int) -> None:
    workers = [SeenHandoff(f"p{n}", "prefill", "ready") for n in range(sources)]
    workers += [SeenHandoff(f"d{n}", "decode", "ready") for n in range(targets)]
    drawn = built(Scene(at=NOW, workers=workers))["workers"]
    roles = [worker["role"] for worker in drawn]
    assert len(drawn) == WORKERS_MAX
    assert roles.count("decode") == min(targets, max(WORKERS_MAX // 2, WORKERS_MAX - sources))


def test_troubled_workers_are_drawn_before_others_and_those_that_left_last() -> None:
    workers = [SeenHandoff(f"p{n}", "prefill", "gone" if n < 100 else "ready") for n in range(200)]
    workers.append(SeenHandoff("p999", "prefill", "broken"))
    drawn = built(Scene(at=NOW, workers=workers))["workers"]
    assert "p999" in [worker["name"] for worker in drawn]
    assert not any(worker["state"] == "gone" for worker in drawn)


def test_names_with_numbers_are_in_the_order_of_the_numbers() -> None:
    names = ["p10", "p9", "p1", "p", "p²", "9p", "p1a", "p01"]
    workers = [SeenHandoff(name, "prefill", "ready") for name in names]
    drawn = [worker["name"] for worker in built(Scene(at=NOW, workers=workers))["workers"]]
    assert drawn == ["p", "p1", "p01", "p1a", "p9", "p10", "p²", "9p"]
