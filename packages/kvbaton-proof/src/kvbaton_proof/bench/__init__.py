"""Benchmarks: every figure compared with a peer's or the machine's, in one run."""
