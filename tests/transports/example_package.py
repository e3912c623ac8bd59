"""The example of a transport in a package of its own, installed into a directory."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "transport"
SETUP = "from setuptools import setup; setup()"


def install(base: Path) -> Path:
    """Where it was installed to, without a network: by pip where a wheel can be built here, else as pip would."""
    source, target = base / "source", base / "target"
    shutil.copytree(EXAMPLE, source)  # building leaves things behind
    if any(map(_has, ("wheel", "setuptools.command.bdist_wheel"))):
        flags = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
        words = ["-m", "pip", "install", "-q", *flags, "--target", str(target), str(source)]
    else:
        target.mkdir()
        words = ["-c", SETUP, "-q", "build_py", "--build-lib", str(target), "egg_info", "--egg-base", str(target)]
    done = subprocess.run([sys.executable, *words], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
