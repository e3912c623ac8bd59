"""Ray Serve's side of kvbaton: `from kvbaton.integrations.ray import build_pd_app`.

Importing this package costs nothing and needs no Ray; what does is loaded when it is asked for by name.

pd_app             the application: deployments, their defaults, an ingress that asks another D, the backend
ray_backend        what Ray asks of a connector: a replica's identity, and the shape of both requests
decode_replica     Ray's servers, with what follows
orchestrator       D: asks P, another P, or computes alone
fail_stop          a replica ends with its engine

Only the first three import Ray.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["BatonBackend", "build_pd_app", "register"]
_WHERE = {"build_pd_app": "pd_app", "register": "pd_app", "BatonBackend": "ray_backend"}


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs Ray Serve: pip install 'ray[serve]==2.60.0' pyarrow 'fastapi<0.137'; docs/ray.md",
            name=error.name,
        ) from error
