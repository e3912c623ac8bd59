"""What a plain installation leaves out, and how to get it.

Law: whatever serves clients, and whatever looks at a cluster, runs without these; engines, stores and proofs need them.
"""

from __future__ import annotations

import importlib.util

GET = "pip install 'kvbaton[serve]'"
LIBRARIES = frozenset({"numpy", "httptools", "uvloop", "xxhash", "yaml", "shtab"})
"""The first comes with the extra. Where another is missing, packages were left out, and the extra brings that too."""


def lacking(error: BaseException) -> str | None:
    """What to install, if a library is missing; None for another error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"this needs {name}: {GET}" if name in LIBRARIES else None


def need(name: str) -> None:
    """`ModuleNotFoundError` now, before processes are started that would end with it."""
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
