"""procfs: READ from another process of this host by `pread`, through `/proc/PID/fd`. One thread copies.

Memory of `kvbaton.transports.core.shared_memory` is a file without a name. Its owner tells a peer where to find it;
the peer opens
it and reads. The kernel lets only processes of the same user do that, so there is no secret to mint; and a peer that
has opened the file keeps it, so the plane does not enforce what is lent.

Law: a file is read only if it is the one that the endpoint names (`device`, `inode`): process ids are used again.
"""

from __future__ import annotations

import os
import queue
import threading
from functools import partial

import msgspec

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.catalogue_entry import CatalogueEntry
from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.shared_memory import RegisteredMemory, region_of
from kvbaton.transports.core.shell import PlaneShell

CAPABILITIES = Capabilities(
    name="procfs", one_sided=True, can_write=False, can_fence=False, cancels=True, same_host=True
)
COPIES_MAX = 256  # accepted at a time; more are told to come again
PIECE_BYTES = 1 << 20  # a cancelled copy stops after at most one piece more
CLOSE_S = 5.0


class Place(msgspec.Struct, frozen=True):
    """Where a region is found, and how the file is known again."""

    path: str
    device: int
    inode: int
    offset: int
    size: int


class Endpoint(msgspec.Struct, frozen=True, tag="procfs"):
    owner: PeerId
    regions: dict[int, Place]


class Files:
    """The link to one peer: its files, opened by the mover at the first copy."""

    def __init__(self, there: Endpoint) -> None:
        self.there = there
        self._files: dict[int, int] = {}

    def file(self, region: int) -> tuple[int, Place]:
        place = self.there.regions[region]
        if region not in self._files:
            fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != (place.device, place.inode):
                os.close(fd)
                raise OSError(f"{place.path} is another file now")
            self._files[region] = fd
        return self._files[region], place

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class ProcfsTransport(PlaneShell[Files]):
    """The shell has `submit`, `cancel`, `disconnect`, `drain` and `close`; here is what is procfs's own."""

    capabilities = CAPABILITIES
    _memory: RegisteredMemory

    def __init__(self, me: PeerId) -> None:
        super().__init__(me, COPIES_MAX)
        self._memory = RegisteredMemory()
        self._places: dict[int, Place] = {}
        self._todo: queue.SimpleQueue[partial[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"procfs-{me}", daemon=True)
        self._thread.start()

    # --- memory and peers

    def register(self, region: int, memory: memoryview) -> None:
        found = region_of(memory)
        if found is None:
            raise ValueError(
                f"region {region}: procfs shares only memory that kvbaton.transports.core.shared_memory has"
            )
        self._memory.add(region, memory)
        whole, offset = found
        about = os.fstat(whole.fd)
        path = f"/proc/{os.getpid()}/fd/{whole.fd}"
        self._places[region] = Place(path, about.st_dev, about.st_ino, offset, memory.nbytes)

    def endpoint(self, peer: PeerId) -> bytes:
        return msgspec.msgpack.encode(Endpoint(self._me, self._places))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        try:
            there = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"not an endpoint of procfs: {error}") from None
        if there.owner != peer or any(not place.path.startswith("/proc/") for place in there.regions.values()):
            raise ValueError(f"not an endpoint of {peer}")
        self._link(peer, there, lambda: Files(there))

    # --- hooks of the shell

    def _start(self, job: CopyJob, link: Files) -> None:
        job.parts.append(job.copy.spans)
        self._todo.put(partial(self._copy, job, link))

    def _retire(self, link: Files, detail: str) -> None:
        self._todo.put(partial(link.close))  # after the copies that were queued before, which have ended

    def _halt(self) -> bool:
        self._todo.put(None)
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    # --- the mover's thread

    def _run(self) -> None:
        while (action := self._todo.get()) is not None:
            action()

    def _copy(self, job: CopyJob, link: Files) -> None:
        if self._jobs.begin(job) is None:
            return  # it was cancelled before it began
        try:
            self._move(job, link)
        except (ValueError, KeyError) as error:
            self._jobs.part_ended(job, Reason.BAD_SPAN, f"outside the memory of one side: {error}")
        except OSError as error:
            self._jobs.part_ended(job, Reason.UNREACHABLE, f"cannot read from {link.there.owner}: {error}")
        else:
            self._jobs.part_ended(job)

    def _move(self, job: CopyJob, link: Files) -> None:
        copy = job.copy
        file, place = link.file(copy.remote_region)
        self._total(copy, place.size)  # all spans, before a byte moves
        memory = self._memory.get(copy.local_region)
        assert memory is not None  # the shell has looked
        flat = copy.spans
        for local, remote, size in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
            at = 0
            while at < size:
                if job.halt[0]:
                    return  # it has its reason already
                piece = memory[local + at : local + min(at + PIECE_BYTES, size)]
                count = os.preadv(file, [piece], place.offset + remote + at)
                if not count:
                    raise OSError(f"{place.path} ends early")
                at += count


PLANE = CatalogueEntry(
    name="procfs",
    what="host memory of another process on this host, by pread",
    needs="Linux",
    usable=lambda: "" if os.path.isdir("/proc/self/fd") else "there is no /proc",
    capabilities=lambda: CAPABILITIES,
    make=lambda me, settings: ProcfsTransport(me),
    shares=True,
)
