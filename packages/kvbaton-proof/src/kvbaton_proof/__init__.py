"""Proof of the product: simulation, chaos with its attack code, conformance, benchmarks and the GPU test.

Law: this distribution imports `kvbaton`; nothing of `kvbaton` imports it but the command line, when one of its commands
is called, and no engine ever does.
"""

__version__ = "0.1.0"
