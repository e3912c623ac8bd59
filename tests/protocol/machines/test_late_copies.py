"""A data plane that reports a copy of something long closed costs a count, never the node (promise 4)."""

from __future__ import annotations

from pair import Pair

from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, Reader, ReservationId, WorkerId
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.machines.push_writer import Outlet


def test_the_end_of_a_write_whose_outlet_is_gone_is_late():
    pair = Pair("p", "d")
    reader = Reader(PeerId(WorkerId("d"), Incarnation(1)), 1)
    closed = Outlet(LeaseId(9), reader, ReservationId(9), b"", 0, (), (), Parts(None))
    pair.p.ledger.producer.writer.on_copy_ended(closed, CopyEnded(JobId(1)), 0, 0.0)
    assert pair.p.counts["late.copy"] == 1
    pair.finish()
