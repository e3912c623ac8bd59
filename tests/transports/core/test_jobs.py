"""Every accepted copy ends exactly once, by the rules of rest; the bound and the waker hold."""

from __future__ import annotations

import threading
from array import array

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, Direction

PEER = PeerId(WorkerId("p"), Incarnation(1))


def accepted(jobs: Jobs, number: int = 1, parts: int = 0) -> CopyJob:
    job = jobs.accept(Copy(JobId(number), PEER, Direction.READ, 0, 0, array("q")))
    assert job is not None
    job.parts.extend(array("q", [0, 0, 1]) for _ in range(parts))
    return job


def test_a_job_ends_when_its_last_part_has() -> None:
    jobs = Jobs(4)
    job = accepted(jobs, parts=2)
    assert jobs.begin(job) is not None and jobs.begin(job) is not None and jobs.begin(job) is None
    jobs.part_ended(job)
    assert jobs.drain() == []
    jobs.part_ended(job)
    assert jobs.drain() == [CopyEnded(JobId(1))]


def test_the_first_reason_counts_and_no_further_part_begins() -> None:
    jobs = Jobs(4)
    job = accepted(jobs, parts=3)
    jobs.begin(job)
    jobs.begin(job)
    jobs.part_ended(job, Reason.BAD_SPAN, "first")
    assert job.halt == b"\1" and jobs.begin(job) is None
    jobs.fail(job, Reason.CANCELLED)
    jobs.part_ended(job, Reason.TRANSFER_FAILED, "second")
    assert jobs.drain() == [CopyEnded(JobId(1), Reason.BAD_SPAN, True, "first")]


def test_a_job_that_failed_before_it_began_ends_at_rest() -> None:
    jobs = Jobs(4)
    jobs.fail(accepted(jobs, parts=3), Reason.CANCELLED)
    assert jobs.drain() == [CopyEnded(JobId(1), Reason.CANCELLED)]


def test_an_abandoned_job_ends_now_and_rests_later() -> None:
    jobs = Jobs(4)
    job = accepted(jobs, parts=2)
    jobs.begin(job)
    jobs.abandon(job, Reason.CANCELLED)
    jobs.abandon(job, Reason.PEER_GONE)
    jobs.fail(job, Reason.PEER_GONE)
    assert jobs.drain() == [CopyEnded(JobId(1), Reason.CANCELLED, at_rest=False)]
    jobs.part_ended(job, Reason.TRANSFER_FAILED)
    assert jobs.drain() == [CopyRested(JobId(1))]


def test_a_job_whose_rest_cannot_be_proven_never_claims_it() -> None:
    jobs = Jobs(4)
    ended, abandoned = accepted(jobs, 1, parts=1), accepted(jobs, 2, parts=1)
    jobs.begin(ended)
    jobs.begin(abandoned)
    jobs.part_ended(ended, Reason.TRANSFER_FAILED, rested=False)
    jobs.abandon(abandoned, Reason.CANCELLED)
    jobs.part_ended(abandoned, rested=False)
    assert [(event.job, event.at_rest) for event in jobs.drain() if isinstance(event, CopyEnded)] == [
        (1, False),
        (2, False),
    ]
    assert jobs.drain() == []


def test_the_bound_counts_ends_that_nobody_has_drained() -> None:
    jobs = Jobs(2)
    for number in (1, 2):
        jobs.settle(accepted(jobs, number))
    full = Copy(JobId(3), PEER, Direction.READ, 0, 0, array("q"))
    assert jobs.accept(full) is None
    jobs.drain()
    assert jobs.accept(full) is not None


def test_a_job_number_in_use_is_the_callers_mistake() -> None:
    jobs = Jobs(4)
    accepted(jobs, parts=1)
    with pytest.raises(ValueError, match="already in flight"):
        accepted(jobs)


def test_nothing_is_accepted_after_closing() -> None:
    jobs = Jobs(4)
    assert jobs.close() and not jobs.close()
    assert jobs.accept(Copy(JobId(1), PEER, Direction.READ, 0, 0, array("q"))) is None


def test_the_waker_is_called_once_per_batch_of_news_and_without_the_lock() -> None:
    jobs = Jobs(8)
    held: list[bool] = []

    def waker() -> None:
        free = threading.Event()
        threading.Thread(target=lambda: (jobs.of_peer(), free.set())).start()
        held.append(not free.wait(5))

    jobs.set_waker(waker)
    with jobs:
        for number in (1, 2):
            jobs.settle(accepted(jobs, number))
        assert held == []
    assert held == [False]
    jobs.settle(accepted(jobs, 3))
    assert held == [False]
    jobs.drain()
    jobs.settle(accepted(jobs, 4))
    assert held == [False, False]


def test_a_waker_set_late_hears_of_old_news_and_one_that_raises_hurts_nobody() -> None:
    jobs = Jobs(8)
    jobs.settle(accepted(jobs))

    def waker() -> None:
        calls.append(1)
        raise OSError("closed")

    calls: list[int] = []
    jobs.set_waker(waker)
    assert calls == [1]
