"""SGLang's side of kvbaton: `sglang serve … --disaggregation-transfer-backend kvbaton`, by SGLang's own entry point.

Importing this package is cheap and needs no SGLang; SGLang calls `register` in each of its processes.
"""

from __future__ import annotations


def register() -> None:
    """For the entry point `sglang.srt.plugins`."""
    from kvbaton.engines.sglang.plugin import register as put_in

    put_in()
