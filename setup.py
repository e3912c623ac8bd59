"""Builds the optional block mover; everything else is in pyproject.toml.

The extension is optional on purpose: without a compiler the package installs and runs on the pure-Python mover, slower
but with the same contract (tests run both). KVBATON_MOVER says otherwise:

    built   leave the one that a checkout has: a second environment is made while programs that have it mapped run
    none    a wheel without it, for any machine
    must    fail without a compiler: what a release is built with
"""

import os

from setuptools import Extension, setup

wanted = os.environ.get("KVBATON_MOVER", "")
mover = Extension(
    "kvbaton.transports.core._mover",
    sources=["src/kvbaton/transports/core/_mover.c"],
    extra_compile_args=["-O3"],
    optional=wanted != "must",
    py_limited_api=True,
)
has_mover = wanted not in ("built", "none")
setup(
    ext_modules=[mover] if has_mover else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if has_mover else {},
)
