"""What an engine shows of itself, put together: records, metrics, files, reports."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kvbaton.node.node_loop import NodeObservation, dump_on_signal
from kvbaton.observe.flight import dumps
from kvbaton.observe.flight.dumps import Dumps, read
from kvbaton.observe.flight.flight_records import decode
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import TurnedAway
from kvbaton.protocol.ids import RequestId
from tests.node.test_node import DIGEST, TOKENS, R
from tests.node.test_node import Net as Two


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written by the end of a `close`, also where the disk or the machine stands still."""
    monkeypatch.setattr(dumps, "CLOSE_S", 60.0)


def watched(net: Two, directory: str = "") -> tuple[NodeObservation, NodeObservation]:
    """P's and D's."""
    found = []
    for life in (net.p, net.d):
        watch = NodeObservation(life.node.ledger.desk.identity.me, directory=directory)
        life.node.recorder = watch.recorder
        watch.begin(life.node, lambda: {"blocks": 64.0})
        found.append(watch)
    return found[0], found[1]


def test_a_handoff_is_on_record_at_both_ends_and_in_the_metrics(tmp_path: Path) -> None:
    net = Two()
    p, d = watched(net, str(tmp_path))
    net.load()
    net.d.step(4000.0)  # an engine that takes nothing is not waited for
    (lent,), (taken,) = p.recorder.last(5), d.recorder.last(5)
    assert lent.handoff == taken.handoff and (lent.end, taken.end) == ("delivered", "delivered")
    assert taken.request == R and taken.bytes > 0 and lent.peers == ("d",)
    told = decode(d.report() or b"")
    assert told.gauges["handoffs_total"] == told.gauges["delivered_total"] == 1
    assert told.gauges["blocks"] == 64 and told.gauges["pins"] == 0 and told.links == {"p": taken.transport}
    assert told.flights == (taken,)
    names = {family.metric.name for family in d.handoffs.families() if family.samples}
    assert "kvbaton_handoffs_total" in names
    for watch in (p, d):
        watch.close()
    assert list(tmp_path.iterdir()) == [], "nothing failed"


def test_a_failure_is_written_where_a_place_was_named(tmp_path: Path) -> None:
    net = Two()
    p, d = watched(net, str(tmp_path))
    net.d.node.tell(TurnedAway(RequestId("x"), Reason.TICKET_FORGED, "ticket: no"))
    net.d.step(1.0)
    for watch in (p, d):
        watch.close()
    (path,) = tmp_path.iterdir()
    assert [each.end for each in read(path)] == ["ticket_forged"]


def test_before_it_begins_there_is_nothing_to_report() -> None:
    watch = NodeObservation(Two().p.node.ledger.desk.identity.me)
    assert watch.report() is None and list(watch.flights()) == []
    watch.close()


def test_everything_known_is_told_once_oldest_first() -> None:
    net = Two()
    p, d = watched(net)
    net.d.node.tell(TurnedAway(RequestId("x"), Reason.TICKET_FORGED))
    net.d.step(1.0)
    net.d.doorway.want(R, net.p.doorway.grant(DIGEST, TOKENS, ((1, 2, 3),))[0], DIGEST, TOKENS)
    net.d.step(2.0)
    assert [each.request for each in d.flights()] == ["x", R]
    for watch in (p, d):
        watch.close()


def test_a_signal_has_all_of_it_written(tmp_path: Path) -> None:
    net = Two()
    p, d = watched(net, str(tmp_path))
    net.d.node.tell(TurnedAway(RequestId("x"), Reason.ABORTED))
    net.d.step(1.0)
    before = signal.getsignal(signal.SIGUSR2)
    try:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert dump_on_signal(d.dumps) and not dump_on_signal(d.dumps), "somebody uses it already"
        os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    for watch in (p, d):
        watch.close()
    (path,) = tmp_path.glob("*.dump.jsonl")
    assert [each.request for each in read(path)] == ["x"]


def test_only_the_main_thread_may_ask_for_signals(tmp_path: Path) -> None:
    writes, said = Dumps(tmp_path, "d", list), list[bool]()
    thread = threading.Thread(target=lambda: said.append(dump_on_signal(writes)))
    thread.start()
    thread.join(30)
    writes.close()
    assert said == [False]
