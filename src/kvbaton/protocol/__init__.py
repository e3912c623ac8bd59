"""The rules of a handoff, pure: no I/O, threads, clocks, randomness or logging."""
