"""cuda: READ from the device memory of another process of this host, all spans of a copy by one kernel launch.

P sends D the IPC handles of its allocations when something is lent to D for the first time (`cuda_listener`), D opens
them (`cuda_client`), and D's mover launches one kernel over a table of spans (`cuda_move.cu`) on its own stream. P
takes no part; it need not even be running. Nothing here needs PyTorch; only the driver is called (`cuda_driver`). A
copy that finds the device idle is launched by the submitting thread, if that takes no more than a check, a small table
and a few launches.

Law: only the mover touches memory. Every span is checked here, against the memory that this side has registered and
that the peer announced, before the device gets it. A copy ends when the device has said that its launch is over: a
launch cannot be stopped, but it rests within milliseconds, so a cancelled copy ends as soon as that.

Death: memory that D has opened stays allocated when P dies, and P's successor could not use it. So the end of P's
lifeline ends the copies out of P and forgets it: its memory is closed after the last launch, and the next copy fails
because the peer is unknown, on which the ledger pairs again, with a successor if there is one.

Several GPUs: an endpoint names its device. Where D's device cannot read P's (no NVLink, no peer access over PCIe) this
transport is given up for the pair at its first empty copy, and memory is staged through pinned host memory.

Streams: copies wait only for their own `after`. A CUDA event there (anything with a `cuda_event`) is waited for asleep,
on a stream of the gate's. Delivered data may be read after `CopyEnded`, when the bytes are visible to every stream of
the device.

Launches the copies of one transport: a single one at once, several waiting ones together in one launch.

Law: a mover holds a part of a copy from `begin` until the device is done with it. Nothing is launched that was not
checked, and a copy that was cancelled before its turn is not launched at all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.jobs import CopyJob, Jobs
from kvbaton.transports.core.shared_memory import DeviceMemory, RegisteredDevice, host_identity
from kvbaton.transports.core.shell import AdmittingShell
from kvbaton.transports.core.transport import Capabilities, Copy, DeviceEvent, Spans
from kvbaton.transports.cuda.cuda_client import CudaAttachment, CudaLimits, CudaRemote, Mapped
from kvbaton.transports.cuda.cuda_driver import SHARE, CudaError, CudaGpu, Gpu, check_share, quiet_event
from kvbaton.transports.cuda.cuda_listener import CudaDoor, CudaEndpoint, parse_endpoint
from kvbaton.transports.cuda.cuda_runner import (
    GROUP_NUMBERS,
    GROUPS_MAX,
    LAUNCH_BYTES,
    SMALL_NUMBERS,
    TABLE_NUMBERS_MAX,
    UNDER_WAY_MAX,
    CudaRunner,
    LaunchGroup,
    Tables,
    bytes_of,
    check_weave,
    numbers_of,
    parts_of,
)
from kvbaton.transports.net.socket_loop import SocketLoop

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


log = logging.getLogger(__name__)

CLOSE_S = 5.0
CAPABILITIES = Capabilities(
    name="cuda",
    one_sided=True,
    can_write=False,
    can_fence=False,
    cancels=True,
    same_host=True,
    device_kinds=("cuda",),
    weaves=True,
    admits=True,
)


class CudaConfig(msgspec.Struct, frozen=True):
    device: int = 0
    copies_max: int = 1024
    dial_deadline_s: float = 5.0
    idle_s: float = 60.0  # unused memory of a peer is closed after this, until it is needed again
    share: float = SHARE  # of the device's multiprocessors

    def __post_init__(self) -> None:
        check_share(self.share)


class CudaTransport(AdmittingShell[CudaAttachment]):
    """See `base.DeviceTransport`. Threads: one for handles, two that drive the device, one more to wait for events."""

    capabilities = CAPABILITIES
    _memory: RegisteredDevice

    def __init__(self, me: PeerId, config: CudaConfig | None = None, gpu: Gpu | None = None) -> None:
        """ImportError without a driver, CudaError without a device; `gpu` is for tests."""
        config = config or CudaConfig()
        super().__init__(me, config.copies_max)
        self._gpu = gpu or CudaGpu(config.device, config.share)
        self._memory = RegisteredDevice(config.device)
        self._mapped = Mapped()
        self._limits = CudaLimits(config.dial_deadline_s, config.idle_s)
        self._loop = SocketLoop(f"kvbaton-cuda-door-{me}")
        self._door = CudaDoor(me, self._gpu, self._loop, config.dial_deadline_s)
        self._launcher = CudaMover(f"kvbaton-cuda-{me}", self._gpu, self._jobs)

    @property
    def broken(self) -> str:
        """Why the device is unusable; empty while it works."""
        return self._launcher.broken

    @property
    def refusals(self) -> Mapping[str, int]:
        """Refused connections; see `refusals.Cause`."""
        return self._door.refusals

    @property
    def mapped_bytes(self) -> int:
        """Device memory of other processes that is open here, and cannot be freed before it is closed."""
        return self._mapped.nbytes

    def register(self, region: int, memory: DeviceMemory) -> None:
        """It must stay allocated until `close`; a peer that something was lent to is trusted with all of its
        allocation."""
        self._memory.add(region, memory)
        self._door.add(region, memory)

    def endpoint(self, peer: PeerId) -> bytes:
        """Listens from the first call on. The same until `peer` is disconnected, then a new one."""
        name, secret = self._door.listen(), self._door.keyring.mint(peer)
        return msgspec.msgpack.encode(CudaEndpoint(self._me, host_identity(), name, secret, self._gpu.uuid))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """Requests the peer's handles right away, in the background, and has them when something is lent to us; the
        first copy opens them.

        A device that ours cannot read fails the copies, with the reason: so the pair takes the next transport and logs
        why.
        """
        there = parse_endpoint(peer, endpoint)
        problem = self._no_way_to(there)

        def attach() -> CudaAttachment:
            made = CudaAttachment(self._me, there, self._loop, self._jobs, self, self._mapped, self._limits)
            made.problem = problem
            if not problem:
                made.dial()
            return made

        self._link(peer, there, attach)

    def on_lost(self, peer: PeerId, attachment: CudaAttachment, detail: str) -> None:
        """See `cuda_attach.Owner`."""
        if self._links.get(peer) is attachment:
            log.info("%s has exited or disconnected us (%s): its device memory is closed", peer, detail)
            self._forget(peer, Reason.TRANSFER_FAILED, f"{peer} has exited or disconnected us: {detail}")

    def retire(self, remote: CudaRemote) -> None:
        """See `cuda_attach.Owner`."""
        if remote.shut():
            self._launcher.after(partial(remote.close, self._gpu))

    def _turn_away(self, peer: PeerId) -> None:
        """`peer` gets nothing new, and is asked to close what it has opened; it cannot be forced to."""
        self._door.revoke(peer)
        self._admit_again(peer)

    def _admit(self, engine: PeerId) -> None:
        self._door.admit(engine)

    def _dismiss(self, engine: PeerId) -> None:
        self._door.dismiss(engine)

    def _refusal(self, copy: Copy, link: CudaAttachment) -> tuple[Reason, str] | None:
        if link.problem:
            return Reason.UNREACHABLE, link.problem
        refusal = super()._refusal(copy, link)
        return (Reason.TRANSFER_FAILED, self.broken) if refusal is None and self.broken else refusal

    def _event(self, event: DeviceEvent) -> DeviceEvent:
        return quiet_event(event, self._gpu)

    def _no_way_to(self, there: CudaEndpoint) -> str:
        """Why this device cannot read the peer's; "" when it can, or when only opening its memory can tell."""
        try:
            can = self._gpu.reaches(there.device) if there.device else None
        except CudaError as error:
            return f"cannot query peer access: {error}"
        if can is not False:
            return ""
        gpus = f"from GPU {self._gpu.uuid} to GPU {there.device} of {there.owner}"
        return f"no peer access {gpus}; see nvidia-smi topo -p2p r"

    def _start(self, job: CopyJob, link: CudaAttachment) -> None:
        link.use(job, partial(self._plan, job))

    def _plan(self, job: CopyJob, remote: CudaRemote) -> None:
        self._launcher.add(Due(job, remote, self._check))

    def _check(self, job: CopyJob, remote: CudaRemote) -> int | None:
        """By the launching thread: checks the whole copy against both memories. The local address, or None: it has
        failed."""
        copy = job.copy
        target, remote_bytes = self._memory.get(copy.local_region), remote.size_of(copy.remote_region)
        try:
            if target is None or remote_bytes is None:
                raise ValueError(f"{copy.peer} has no region {copy.remote_region}")
            parts = self._checked(copy.spans, target.nbytes, remote_bytes)
            if copy.weave is not None:
                parts += self._checked(copy.weave, target.nbytes, remote_bytes)
        except ValueError as error:
            self._jobs.fail(job, Reason.BAD_SPAN, str(error))
            return None
        with self._jobs:
            if not job.halt[0]:
                job.parts = cast("deque[Spans]", parts)
        return target.address

    def _checked(self, spans: Spans | Weave, local_bytes: int, remote_bytes: int) -> deque[Spans | Weave]:
        """What each launch takes. ValueError when any of it lies outside."""
        if isinstance(spans, Weave):
            return parts_of(spans, check_weave(spans, local_bytes, remote_bytes))
        return parts_of(spans, self._mover.check_spans(spans, 3, local_bytes, remote_bytes) if spans else 0)

    def _stop(self, job: CopyJob, link: CudaAttachment | None, reason: Reason, detail: str) -> None:
        if link is not None:
            link.remove(job)
        super()._stop(job, link, reason, detail)

    def _retire(self, link: CudaAttachment, detail: str) -> None:
        link.close()

    def _halt(self) -> bool:
        self._launcher.close(CLOSE_S)
        self._loop.stop(CLOSE_S)
        self._door.close()
        return True
