"""`"name": "auto"`: a name that says where a member runs, and that no other process has.

    pod, replica or host name [.dpI] - random tail

Law: what is made is a valid `WorkerId`, never two times the same, and never of a kind that is kept for a role
(`router…`, `operator…`, `store…`). A restart is another name: the one before may still be listed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping

from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, WorkerId
from kvbaton.protocol.privileges import Role, role_by_name

AUTO = "auto"
BASE_ENV = ("KVBATON_NAME_BASE", "POD_NAME", "HOSTNAME")
"""Where a platform says what this replica is called; the first that is there."""
TAIL_CHARS = 6
_TAIL = "bcdfghjklmnpqrstvwxz"  # no digits, which would read as a rank; no vowels, and so no words
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def auto_name(
    part: str = "",
    environ: Mapping[str, str] = os.environ,
    host: Callable[[], str] = socket.gethostname,
) -> WorkerId:
    """`part` tells processes of one engine apart, such as `dp1`."""
    base = next((environ[name] for name in BASE_ENV if environ.get(name)), "") or host() or "member"
    clean = _ODD.sub("-", base).strip("-._") or "member"
    if role_by_name(clean) is not Role.BOTH:
        clean = f"w-{clean}"
    end = (f".{part}" if part else "") + "-" + "".join(secrets.choice(_TAIL) for _ in range(TAIL_CHARS))
    return WorkerId(clean[: WORKER_ID_CHARS_MAX - len(end)].rstrip("-._") + end)
