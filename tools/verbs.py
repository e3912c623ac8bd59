"""Lets Mooncake find libibverbs where the system has none: it borrows the one inside nixl's package.

    .venv/bin/python tools/verbs.py

Law: nothing is changed where the system has the library. Mooncake 0.3.13 needs `libibverbs.so.1` even without RDMA; its
modules and `mooncake_master` look for it beside their own bundled libraries first (RPATH). The wheel of nixl brings the
same library under a name with a hash, so links are all it takes: to that file, and to the two that it needs beside it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import sysconfig
from pathlib import Path

WANTED = "libibverbs.so.1"
OWNER, LENDER = "mooncake_transfer_engine*.libs", "nixl_cu*.libs"
FILES = {"libibverbs-*": WANTED, "libnl-3-*": "", "libnl-route-3-*": ""}
"""What is lent, and the name that it is looked for by when that is not its own."""

TRY = "import mooncake.engine, mooncake.store"
ADVICE = f"{WANTED} is missing: apt-get install libibverbs1, or pip install nixl-cu13 and run this again"


def system_has_it() -> bool:
    try:
        ctypes.CDLL(WANTED)
    except OSError:
        return False
    return True


def borrow(site: Path) -> bool:
    """Link nixl's library into Mooncake's folder, and what it needs; False where one of the two is not installed."""
    for owner in site.glob(OWNER):
        for lender in site.glob(LENDER):
            for pattern, name in FILES.items():
                for file in lender.glob(pattern):
                    link = owner / (name or file.name)
                    link.unlink(missing_ok=True)
                    link.symlink_to(Path("..", lender.name, file.name))
            return True
    return False


def main() -> int:
    lent = system_has_it() or borrow(Path(sysconfig.get_path("platlib")))
    tried = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=False, timeout=60)
    if tried.returncode:
        print(tried.stderr.strip() if lent else ADVICE, file=sys.stderr)
    return tried.returncode


if __name__ == "__main__":
    sys.exit(main())
