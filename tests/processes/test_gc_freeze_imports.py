"""Imports that last: not looked at again, while all that comes later is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from kvbaton.processes.gc_freeze_imports import gc_freeze_imports
try:
    with gc_freeze_imports():
        within = gc.isenabled()
        raise ImportError
except ImportError:
    pass
kept = gc.get_freeze_count()
made = []
made.append(made)
del made
print(within, gc.isenabled(), kept > 0, gc.collect() > 0)
"""


def test_what_was_imported_is_left_alone_and_what_comes_later_is_collected() -> None:
    """In a process of its own: nothing of the tests' is to stay for good."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False True True True\n"
