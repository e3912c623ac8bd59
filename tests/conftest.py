"""For all tests: children can be interrupted, however the tests were started, and properties hold on any machine.

A shell without job control starts what it puts in the background with SIGINT ignored; children inherit that, and so a
test that interrupts one would wait for nothing.

Properties see the same examples in every run, and none of them has to be quick: what is found by chance is found by
`KVBATON_FUZZ=nightly`, where it can be looked into, and not in somebody else's change.

What was collected stays until the end, thousands of tests and all that they import: the garbage collector need not look
at it again whenever a test fills its memory, or asks what is left there.

No test trusts the system's certificates, and every process that imports aiohttp reads them all, for a tenth of a
second: there are none, unless somebody says where.

A test that needs a library beside .venv's own (`@pytest.mark.library("nixl")`) is skipped where it is missing, and says
what to install; with KVBATON_TEST_ALL=1, as `make test` runs it, that is one error for all of them.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal

import pytest

from tests.async_tests import pytest_pyfunc_call, run, run_once  # noqa: F401 - for all tests

LIBRARIES = {"nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}
HOW = "make planes-env installs it, or pip install --no-deps the versions that the Makefile names"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Once for each library, instead of one failure for each test."""
    missing = {name for name, modules in LIBRARIES.items() if not any(map(importlib.util.find_spec, modules))}
    needing = [(item, set(mark.args) & missing) for item in items for mark in item.iter_markers("library")]
    lacked = sorted(set().union(*(names for _, names in needing)))
    if lacked and os.environ.get("KVBATON_TEST_ALL"):
        count = sum(bool(names) for _, names in needing)
        raise pytest.UsageError(f"{count} tests need {' and '.join(lacked)}, not installed here: {HOW}")
    for item, names in needing:
        if names:
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(sorted(names))}: {HOW}"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


os.environ.setdefault("SSL_CERT_FILE", os.devnull)
os.environ.setdefault("SSL_CERT_DIR", os.devnull)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # vLLM's environment has no properties to test
    pass
else:
    by_chance = os.environ.get("KVBATON_FUZZ") == "nightly"
    settings.register_profile(
        "everywhere",
        derandomize=not by_chance,
        database=None,
        deadline=None,
        print_blob=by_chance,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("everywhere")
