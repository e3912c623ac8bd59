"""Simulated clusters: engines, memory, transports, network, store, ranks, and the clock."""
