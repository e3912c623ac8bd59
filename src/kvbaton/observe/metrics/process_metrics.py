"""What this process uses: CPU, memory, open files, and what Python's garbage collector has done.

Law: read from the kernel and the interpreter when asked, in microseconds; several processes can be shown as one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import resource
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

import kvbaton
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics import process_metric_names as names
from kvbaton.observe.metrics.exposition import Family
from kvbaton.observe.metrics.metric_names import Where

_STARTED = time.time()
_FILES = "/proc/self/fd"
_GC = {
    "collections": names.GC_COLLECTIONS,
    "collected": names.GC_COLLECTED,
    "uncollectable": names.GC_UNCOLLECTABLE,
}


class ProcessFigures(msgspec.Struct, frozen=True):
    """Of one process, or of several as of one."""

    cpu_s: float = 0.0
    resident_bytes: int = 0
    virtual_bytes: int = 0
    open_files: int = 0
    max_files: int = 0
    collections: tuple[int, ...] = (0, 0, 0)  # by generation, as the next two
    collected: tuple[int, ...] = (0, 0, 0)
    uncollectable: tuple[int, ...] = (0, 0, 0)


def own() -> ProcessFigures:
    virtual = resident = open_files = 0
    with contextlib.suppress(OSError):  # without a free descriptor nothing can be opened: the other figures stand
        open_files = os.stat(_FILES).st_size or len(os.listdir(_FILES))  # Linux before 6.2 does not count them
        virtual, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return ProcessFigures(
        time.process_time(),
        resident * page_bytes,
        virtual * page_bytes,
        open_files,
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        **{name: tuple(each[name] for each in gc.get_stats()) for name in _GC},
    )


def together(figures: Iterable[ProcessFigures]) -> ProcessFigures:
    """Of several as of one: sums, and of open files those of the process that is nearest to its limit."""
    found = list(figures)
    return ProcessFigures(
        sum(each.cpu_s for each in found),
        sum(each.resident_bytes for each in found),
        sum(each.virtual_bytes for each in found),
        max(each.open_files for each in found),
        min((each.max_files for each in found if each.max_files), default=0),
        **{name: tuple(map(sum, zip(*(getattr(each, name) for each in found), strict=True))) for name in _GC},
    )


def at_rest(figures: ProcessFigures) -> ProcessFigures:
    """What stays of a process that has ended: what it has used, not what it held."""
    return msgspec.structs.replace(figures, resident_bytes=0, virtual_bytes=0, open_files=0, max_files=0)


def process_families(where: Where, worker: str = "", figures: ProcessFigures | None = None) -> list[Family]:
    """Metrics of every process; by default of this one."""
    found = own() if figures is None else figures
    build = metric_names.BUILD.labelled((kvbaton.__version__, str(where), worker))
    version = platform.python_version_tuple()
    python = (platform.python_implementation(), *version, platform.python_version())
    values = {
        names.STARTED: round(_STARTED, 3),
        names.CPU: found.cpu_s,
        names.RESIDENT: found.resident_bytes,
        names.VIRTUAL: found.virtual_bytes,
        names.OPEN_FILES: found.open_files,
        names.MAX_FILES: found.max_files,
    }
    return [
        Family(metric_names.BUILD, {build: 1}),
        Family(names.PYTHON, {names.PYTHON.labelled(python): 1}),
        *(Family(metric, {(): value}) for metric, value in values.items()),
        *(
            Family(metric, {(str(age),): count for age, count in enumerate(getattr(found, name))})
            for name, metric in _GC.items()
        ),
    ]
