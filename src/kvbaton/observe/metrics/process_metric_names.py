"""The metrics of a process of the operating system and of Python, by the names that Prometheus' own client gives them.

They are part of the list in `metric_names`, whose laws hold here too. A router of several processes shows them as one.
"""

from __future__ import annotations

from kvbaton.observe.metrics.metric_types import Label, Metric, MetricKind, Where

_OWN = (Where.ROUTER, Where.WORKER, Where.STORE, Where.REGISTRY)  # in vLLM the Prometheus client exports them
_GENERATION = Label("generation", ("0", "1", "2"), "of the garbage collector; 0 has the youngest objects")


def _gauge(name: str, text: str) -> Metric:
    return Metric(f"process_{name}", MetricKind.GAUGE, text, _OWN)


def _collected(name: str, text: str) -> Metric:
    return Metric(f"python_gc_{name}_total", MetricKind.COUNTER, text, _OWN, (_GENERATION,))


STARTED = _gauge("start_time_seconds", "Unix time at which this process started counting.")
CPU = Metric(
    "process_cpu_seconds_total", MetricKind.COUNTER,
    "CPU time, user and system, that this process has used; that of a router's processes is added up.", _OWN,
)  # fmt: skip
RESIDENT = _gauge(
    "resident_memory_bytes", "Memory of this process that is in RAM; that of a router's processes is added up."
)
VIRTUAL = _gauge("virtual_memory_bytes", "Address space of this process; that of a router's processes is added up.")
OPEN_FILES = _gauge(
    "open_fds", "Files and connections that this process has open; of a router's processes, that of the one with most.",
)  # fmt: skip
MAX_FILES = _gauge("max_fds", "Files and connections that this process, or each of a router's, may have open.")
GC_COLLECTIONS = _collected("collections", "Runs of Python's garbage collector.")
GC_COLLECTED = _collected("objects_collected", "Objects that Python's garbage collector freed.")
GC_UNCOLLECTABLE = _collected("objects_uncollectable", "Objects that Python's garbage collector could not free.")
PYTHON = Metric(
    "python_info", MetricKind.INFO, "Always 1; the labels have Python's implementation and version.", _OWN,
    tuple(Label(name) for name in ("implementation", "major", "minor", "patchlevel", "version")),
)  # fmt: skip

OF_PROCESSES = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
