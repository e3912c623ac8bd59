"""For all tests: children can be interrupted, however the tests were started, and properties hold on any machine.

A shell without job control starts what it puts in the background with SIGINT ignored; children inherit that, and so a
test that interrupts one would wait for nothing.

Properties see the same examples in every run, and none of them has to be quick: what is found by chance is found by
`KVBATON_FUZZ=nightly`, where it can be looked into, and not in somebody else's change.

What was collected stays until the end, thousands of tests and all that they import: the garbage collector need not look
at it again whenever a test fills its memory, or asks what is left there.
"""

from __future__ import annotations

import gc
import os
import signal


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


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
