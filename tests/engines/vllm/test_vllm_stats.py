"""What crosses from the scheduler to vLLM's metrics, and what comes of it; vLLM's base classes are stood in for."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest

import kvbaton
from kvbaton.engines.vllm.counting import FLIGHTS_MAX, Tray
from kvbaton.node.pin_budget import PinBudget
from kvbaton.node.prompt_account import PromptAccount
from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.metric_names import Where

THEIRS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, config: Any, types: Any, labelnames: list[str], values: dict[int, list[object]]) -> None:
        self._gauge_cls, self._counter_cls, self._histogram_cls = types
        self.per_engine_labelvalues = values


@pytest.fixture(name="stats")
def stats_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    parts = THEIRS.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    monkeypatch.setattr(sys.modules[THEIRS], "KVConnectorStats", KVConnectorStats, raising=False)
    monkeypatch.setattr(sys.modules[THEIRS], "KVConnectorPromMetrics", KVConnectorPromMetrics, raising=False)
    name = "kvbaton.engines.vllm.vllm_stats"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def flight(end: str = "delivered", seat: FlightSeat = FlightSeat.DECODE) -> Flight:
    moments = (Moment("asked", 1.0), Moment("granted", 1.5), Moment("allocated", 2.0), Moment("copied", 3.0))
    return Flight(
        seat=seat, worker="d0", handoff="h", mode="pull", transport="shm", bytes=64, end=end,
        moments=(*moments, Moment("ended", 3.5), Moment("taken", 4.0), Moment("closed", 5.0)),
    )  # fmt: skip


def test_flights_are_told_once_and_as_plain_data() -> None:
    tray = Tray()
    for each in (
        flight(),
        flight("stale"),
        flight(seat=FlightSeat.PREFILL),
        flight(seat=FlightSeat.ROUTER),
        flight(""),
    ):
        tray.add(each)
    rows = tray.take()
    assert rows == msgspec.msgpack.decode(msgspec.msgpack.encode(rows)) and tray.take() == []
    counted = [row for row in rows if row[0] == metric_names.HANDOFFS.name]
    assert counted == [[metric_names.HANDOFFS.name, ["pull", "shm", end], 1] for end in ("delivered", "stale")]
    assert [metric_names.STAGE_SECONDS.name, ["copy", "pull", "shm"], 1.0] in rows
    assert [metric_names.LEASE_ENDS.name, ["pull", "delivered"], 1] in rows


def test_a_tray_that_nobody_empties_stays_small() -> None:
    tray = Tray()
    for _ in range(3 * FLIGHTS_MAX):
        tray.add(flight())
    assert sum(row[0] == metric_names.HANDOFFS.name for row in tray.take()) == FLIGHTS_MAX


class Side:
    """As much of the scheduler's side as metrics ask for."""

    def __init__(self) -> None:
        settings = SimpleNamespace(max_hold_s=180.0, quarantine_blocks_max=4096)
        self.counts = Counts({"leases": 2, "ends.delivered": 1, "links.shm": 1, "frames": 9})
        desk = SimpleNamespace(counts=self.counts, settings=settings)
        producer = SimpleNamespace(leases={}, claims=SimpleNamespace(waiting=0))
        consumer = SimpleNamespace(by_handoff={}, quarantined_blocks=0)
        self.turned_away = {"tcp:left": 0, "tcp:bad_proof": 2}
        node = SimpleNamespace(
            ledger=SimpleNamespace(desk=desk, producer=producer, consumer=consumer),
            port_faults={},
            control=SimpleNamespace(counters={"connections": 3, "admitted": 2}),
            loop=SimpleNamespace(faults=0),
            doorway=SimpleNamespace(pinned_blocks=5, put_blocks=1, turn_blocks=0, budget=PinBudget(45)),
            facts=SimpleNamespace(blocks=60, role="decode"),
            peer=SimpleNamespace(worker="d0"),
        )
        links = SimpleNamespace(data_refused=lambda: self.turned_away, mapped_bytes=lambda: 1 << 30)
        self.presence = SimpleNamespace(node=node, links=links, is_full=lambda: True)
        self.stored = SimpleNamespace(figures=lambda: {"store_puts_total": 4}, held_blocks=1)
        self.reporting = SimpleNamespace(
            prompts=PromptAccount(),
            refused=Counts({"peer_unknown": 1}),
            told=Counts(),
            gauges_told={},
            tray=Tray(),
            turn=SimpleNamespace(comes=lambda: True),
            turn_figures=lambda: {"turn_tokens_total": 0},
        )


def test_a_look_is_taken_ten_times_a_second_and_once_before_rest(stats: ModuleType) -> None:
    """Nothing is lost: what a step passed over is told by the next look, or by one more step before rest."""
    side, now = Side(), [100.0]
    side.reporting.turn = stats.Turn(lambda: now[0])
    told = [stats.BatonStats.of(side)]
    assert told[0] is not None and not side.reporting.turn.rests(), "nothing is left to tell"
    side.reporting.turn.works()
    for _ in range(1000):
        now[0] += 0.001
        side.counts["leases"] += 1
        told.append(stats.BatonStats.of(side))
    looks = [each for each in told if each is not None]
    assert 9 <= len(looks) <= 12
    side.counts["leases"] += 1
    now[0] += 0.001
    assert stats.BatonStats.of(side) is None and side.reporting.turn.rests()
    looks.append(stats.BatonStats.of(side))
    assert stats.BatonStats.of(side) is None and not side.reporting.turn.rests(), "one more step is enough"
    assert sum(look.data["counts"].get("leases_total", 0) for look in looks) == side.counts["leases"]


def test_only_what_is_new_is_told(stats: ModuleType) -> None:
    side = Side()
    first = stats.BatonStats.of(side)
    assert first.data["counts"]["leases_total"] == 2 and first.data["counts"]["ends_total peer_unknown"] == 1
    assert (first.data["gauges"]["pinned_blocks"], first.data["gauges"]["store_pins"]) == (6, 2)
    assert [first.data["gauges"][name] for name in ("pin_max_blocks", "pin_waiting", "full")] == [45, 0, 1.0]
    assert first.data["counts"]["prompt_tokens_total alone"] == 0 == first.data["counts"]["pin_refused_total"]
    assert stats.BatonStats.of(side) is None
    side.counts["leases"] += 1
    second = stats.BatonStats.of(side)
    assert second.data["counts"] == {"leases_total": 1}
    assert first.data["counts"]["data_refused_total tcp:bad_proof"] == 2
    assert first.data["counts"]["data_refused_total tcp:left"] == 0, "told once, so that its first step is seen"
    side.turned_away["tcp:left"] += 1
    assert stats.BatonStats.of(side).data["counts"] == {"data_refused_total tcp:left": 1}
    both = first.aggregate(second)
    assert both.data["counts"]["leases_total"] == 3 and both.reduce()["pinned_blocks"] == 6 and not both.is_empty()
    assert stats.BatonStats().is_empty()
    side.presence = None
    assert stats.BatonStats.of(side) is None


def config(name: str) -> Any:
    own = SimpleNamespace(kv_connector_extra_config={"name": name}, kv_role="kv_consumer")
    return SimpleNamespace(kv_transfer_config=own)


def _registered(kind: Any, registry: Any) -> Any:
    return functools.partialmethod(kind.__init__, registry=registry)


@pytest.mark.parametrize("name", ["d0", "auto"])
def test_vllms_page_has_the_names_of_the_list(stats: ModuleType, name: str) -> None:
    theirs = {"model_name": "tiny", "engine": "0"}
    build = {"version": kvbaton.__version__, "component": "vllm", "worker": "d0"}
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    types = [type(kind.__name__, (kind,), {"__init__": _registered(kind, registry)}) for kind in kinds]
    page = stats.BatonMetrics(config(name), types, ["model_name", "engine"], {0: ["tiny", "0"]})
    assert bool(registry.get_sample_value("kvbaton_build_info", {**theirs, **build})) == (name == "d0")
    side = Side()
    for each in (flight(), flight("stale")):
        side.reporting.tray.add(each)
    page.observe(stats.BatonStats.of(side).data)

    def value(name: str, **labels: str) -> float | None:
        own = {"role": "decode", "worker": "d0"} if name.startswith("kvbaton_") else {}
        return registry.get_sample_value(name, {**theirs, **own, **labels})

    shown = {sample.name for family in registry.collect() for sample in family.samples}
    ours = {name for metric in metric_names.of(Where.VLLM) for name in metric.series}
    assert {name for name in shown if name.startswith("kvbaton_")} <= ours
    assert registry.get_sample_value("kvbaton_build_info", {**theirs, **build}) == 1
    assert value("kvbaton_quarantine_max_blocks") == 60, (
        "not above the cache, or no share of it would be near the bound"
    )
    assert value("kvbaton_leases_total") == 2 and value("kvbaton_ends_total", end="delivered") == 1
    assert value("kvbaton_ends_total", end="stale") == 0, "there from the start"
    assert value("kvbaton_links_total", transport="shm") == 1 and value("kvbaton_connections_total") == 3
    assert value("kvbaton_handoffs_total", mode="pull", transport="shm", end="stale") == 1
    assert value("kvbaton_stage_seconds_sum", stage="copy", mode="pull", transport="shm") == 1.0
    assert value("kvbaton_data_refused_total", transport="tcp", reason="bad_proof") == 2
    assert value("kvbaton_data_refused_total", transport="tcp", reason="left") == 0
    assert value("kvbaton_mapped_bytes") == 1 << 30
    assert value("kvbaton_pinned_blocks") == 6 and value("kvbaton_lease_hold_max_seconds") == 180
    assert value("vllm:nixl_num_failed_transfers_total") == 1, "the one that was refused"
    assert value("vllm:nixl_xfer_time_seconds_count") == 1 and value("vllm:nixl_bytes_transferred_count") == 2
