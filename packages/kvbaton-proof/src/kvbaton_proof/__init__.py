"""Proof of the product: simulation, chaos, conformance, contracts and benchmarks. May import everything; of the product
only the command line imports it."""
