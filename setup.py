"""Builds the optional block mover; everything else is in pyproject.toml.

The extension is optional on purpose: without a compiler the package installs and runs on the
pure-Python mover, slower but with the same contract (tests run both).
"""

import os

from setuptools import Extension, setup

setup(
    # "built": a checkout that a second environment is made for while programs run from it. They have the mover mapped.
    ext_modules=[]
    if os.environ.get("KVBATON_MOVER") == "built"
    else [
        Extension(
            "kvbaton.transports.core._mover",
            sources=["src/kvbaton/transports/core/_mover.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
