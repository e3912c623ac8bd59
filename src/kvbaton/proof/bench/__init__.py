"""Benchmarks: every figure beside a peer's or the machine's, in one run."""
