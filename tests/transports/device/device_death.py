"""Cases of death and loss for planes of device memory, beside the contract: on the fake device and on a real one."""

from __future__ import annotations

from typing import cast

from kvbaton.protocol.errors import Reason
from kvbaton.testing import Log, TransportHarness
from kvbaton.testing.transport_case import READ, SMALL_BYTES, Cases, copy, fill
from kvbaton.transports.core.shared_memory import mapped_bytes_of
from tests.transports.device.device_harness import DeviceHarness

CASES = Cases()


@CASES.add("kill")
def what_was_opened_is_let_go_of_when_its_owner_dies(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    near, log = pair.near.transport, Log(harness, pair.near)
    assert near.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    assert mapped_bytes_of(near) == (SMALL_BYTES if harness.capabilities.name.startswith("cuda") else 0)
    harness.kill(pair.far)
    assert harness.wait(lambda: not mapped_bytes_of(near), 10)
    assert near.submit(copy(2, pair.far, READ, [(0, 0, SMALL_BYTES)]))
    end = log.end(2)
    assert end.reason is not None and end.at_rest, end
    if harness.capabilities.name.startswith("cuda"):
        assert end.reason is Reason.PEER_UNKNOWN, "on which the ledger pairs anew"
    _works(harness)


@CASES.add("kill")
def an_owner_that_loses_its_device_harms_no_reader(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    near, log = pair.near.transport, Log(harness, pair.near)
    assert near.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    cast(DeviceHarness, harness).ruin(pair.far)
    assert near.submit(copy(2, pair.far, READ, [(0, 0, 64)]))
    assert log.end(2).at_rest, "with or without the bytes: a process that has lost its device may keep its memory"
    harness.kill(pair.far)
    _works(harness)


@CASES.add("kill")
def a_reader_that_loses_its_device_harms_no_owner(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    far, log = pair.far.transport, Log(harness, pair.far)
    assert far.submit(copy(1, pair.near, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    cast(DeviceHarness, harness).ruin(pair.far)
    assert far.submit(copy(2, pair.near, READ, [(0, 0, 64)]))
    end = log.end(2)
    assert end.reason is not None and end.at_rest, "it is told so, and its node goes on"
    harness.kill(pair.far)
    _works(harness)


def _works(harness: TransportHarness) -> None:
    """This process and a new one reach each other, both ways."""
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    for job, (reader, owner) in enumerate(((pair.near, pair.far), (pair.far, pair.near)), 1):
        wanted = fill(owner.memory, job)
        assert reader.transport.submit(copy(job, owner, READ, [(0, 0, SMALL_BYTES)]))
        assert Log(harness, reader).end(job).reason is None
        assert bytes(reader.memory) == wanted
