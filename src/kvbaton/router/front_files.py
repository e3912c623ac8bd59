"""Files of the router's front that may change while it serves: when to read one again."""

from __future__ import annotations

import os


def stamp(path: str) -> object:
    """Changes with the file; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
