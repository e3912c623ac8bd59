"""Open files: a router holds three connections per stream, and many systems allow 1,024 files by default."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
