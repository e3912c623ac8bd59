"""Launches the copies of one transport: a single one at once, several waiting ones together in one launch.

Law: a mover holds a part of a copy from `begin` until the device is done with it. Nothing is launched that was not
checked, and a copy that was cancelled before its turn is not launched at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvbaton.protocol.errors import Reason
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.cuda.cuda_client import CudaRemote
from kvbaton.transports.cuda.cuda_driver import CudaError, Gpu
from kvbaton.transports.cuda.cuda_launch import LAUNCH_BYTES, SMALL_NUMBERS, Tables
from kvbaton.transports.cuda.cuda_runner import UNDER_WAY_MAX, CudaRunner
from kvbaton.transports.cuda.cuda_table import (
    GROUP_NUMBERS,
    GROUPS_MAX,
    TABLE_NUMBERS_MAX,
    LaunchGroup,
    bytes_of,
    numbers_of,
)

BATCH_MAX = GROUPS_MAX
"""Copies in one launch: an engine with a tensor for each layer asks for one copy for each."""

QUICK_BYTES = 32 * LAUNCH_BYTES
"""4 GiB, which are launched while the first hundredth of them is moved."""


@dataclass(slots=True, eq=False)
class Due:
    """A waiting copy. `check` gives the local address once all spans are known to be inside."""

    job: CopyJob
    remote: CudaRemote
    check: Callable[[CopyJob, CudaRemote], int | None]
    local: int | None = None
    live: bool = False


class CudaMover:
    """See `cuda_runner.Worker`."""

    def __init__(self, name: str, gpu: Gpu, jobs: Jobs) -> None:
        self._gpu = gpu
        self._jobs = jobs
        self._tables = Tables(gpu, UNDER_WAY_MAX)
        self._runner: CudaRunner[Due] = CudaRunner(name, gpu, self, BATCH_MAX)

    @property
    def broken(self) -> str:
        return self._runner.broken

    def add(self, due: Due) -> None:
        """Launched on the calling thread if that is all there is to do."""
        self._runner.add(due, partial(self._is_quick, due))

    def after(self, action: Callable[[], None]) -> None:
        """Run `action` once all that was added before is over."""
        self._runner.after(action)

    def close(self, join_s: float) -> bool:
        return self._runner.close(join_s)

    def begin(self, batch: list[Due], slot: int, stream: int) -> list[Due]:
        groups: list[LaunchGroup] = []
        for due in batch:
            group = self._next(due, TABLE_NUMBERS_MAX - sum(group.numbers for group in groups))
            if group is not None:
                groups.append(group)
        self._tables.launch(groups, slot, stream)
        return [due for due in batch if due.live]

    def end(self, batch: list[Due], problem: str) -> None:
        for due in batch:
            reason = Reason.TRANSFER_FAILED if problem else None
            if due.live:
                due.live = False
                self._jobs.part_ended(due.job, reason, problem)
            elif reason is not None:
                self._jobs.fail(due.job, reason, problem)

    def closed(self) -> None:
        self._tables.clear()

    def _is_quick(self, due: Due, slot: int) -> bool:
        """Whether its memory is open and its table has room, both of which the driver may take milliseconds to change,
        and whether it is small: few checks and few launches."""
        copy = due.job.copy
        rows = copy.spans if copy.weave is None else copy.weave
        if copy.weave is not None and copy.spans:
            return False
        numbers = GROUP_NUMBERS + numbers_of(rows)
        if numbers > SMALL_NUMBERS or not self._tables.has_room(slot, numbers):
            return False
        return bytes_of(rows) <= QUICK_BYTES and due.remote.has_open(copy.remote_region)

    def _next(self, due: Due, room: int) -> LaunchGroup | None:
        """The next part of a copy, now live, with the addresses that it is between."""
        if due.job.ended:
            return None
        if due.local is None:
            due.local = due.check(due.job, due.remote)
            if due.local is None:
                return None
        try:  # also for a copy of nothing, by which a pair finds out whether this plane can be opened
            remote = due.remote.address_of(due.job.copy.remote_region, self._gpu)
        except CudaError as error:
            if error.sticky:
                raise
            self._jobs.fail(due.job, Reason.UNREACHABLE, f"cannot open the peer's memory: {error}")
            return None
        with self._jobs:
            if due.job.parts and GROUP_NUMBERS + numbers_of(due.job.parts[0]) > room:
                self._runner.add(due)  # behind what is launched now
                return None
            spans = self._jobs.begin(due.job)
            if spans is None:
                self._jobs.settle(due.job)
                return None
            if due.job.parts:
                self._runner.add(Due(due.job, due.remote, due.check, due.local))
        due.live = True
        return LaunchGroup(due.local, remote, spans)
