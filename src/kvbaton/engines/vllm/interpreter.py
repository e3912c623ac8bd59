"""One interpreter for the engine's thread and ours: whoever wants it gets it soon.

With one rank, vLLM's scheduler, its model runner, the ledger's loop and the movers are threads of one process. Python
lets a thread that computes keep the interpreter for 5 ms before it gives way, which is a whole decode step: each time
the engine's thread comes back from the device it would wait that long for a plan that is being made.

Law: only ever shorter than what the process has; an operator who set less is left alone.
"""

from __future__ import annotations

import sys

SWITCH_S = 0.0002
"""Far below a decode step, and far above what a switch costs (some 10 microseconds)."""


def share() -> None:
    """Have threads that compute give way after `SWITCH_S`. In every process in which ours run beside the engine's."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
