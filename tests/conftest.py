"""For all tests: children can be interrupted, however the tests themselves were started.

A shell without job control starts what it puts in the background with SIGINT ignored; children inherit that, and so a
test that interrupts one would wait for nothing.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
