"""A plugin of vLLM for machines with few cores: its processes sleep where they would spin, and are forked where they
would import everything anew. Off by default.

vLLM's processes talk through a ring in shared memory, whose reader calls `sched_yield` in a loop for a second after
each message: the two of an engine that serves keep two cores busy, and two engines on two cores starve each other.
There is no setting for it in 0.32.0: `VLLM_USE_SPINLOOP_EXT` only spins in C (numbers in docs/lab). To delete once
vLLM has one.

An engine's core is a process of its own. Under `vllm serve` it is a new Python, lest a fork inherit a GPU's context,
and imports vLLM and PyTorch for ten seconds of a core. On CPUs there is no such context, and the server has imported
both: a fork of it starts in half the time.

Law: without `KVBATON_CALM=1` nothing is touched; with it, a vLLM that looks different costs one line in the log and
stays as it is. Nothing here raises.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

SWITCH = "KVBATON_CALM"
NAP_S = 0.0002
"""Long beside a yield (0.3 us), short beside a model's step (some ms); each step waits for two messages."""

_RING = "vllm.distributed.device_communicators.shm_broadcast"
_YIELD = "sched_yield"
_WAITERS = (("SpinCondition", "wait"), ("MessageQueue", "acquire_write"))
_PLATFORMS = "vllm.platforms"
_CHECK = "check_and_update_config"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_log = logging.getLogger(__name__)


def install() -> None:
    """The entry point; vLLM calls it in every process that it starts, perhaps more than once."""
    if os.environ.get(SWITCH) != "1":
        return
    for module, change, otherwise in ((_RING, calm, "may spin"), (_PLATFORMS, fork, "take longer to start")):
        try:
            doubt = change(importlib.import_module(module))
        except Exception as error:  # noqa: BLE001 - a plugin that raises would end the engine
            doubt = f"{type(error).__name__}: {error}"
        if doubt is not None:
            said = f"has no effect with this vLLM, whose processes {otherwise}"
            _log.warning("[calm-inert] %s=1 %s: %s", SWITCH, said, doubt)


def calm(ring: ModuleType) -> str | None:
    """Let the ring's readers and writers nap instead of yield; if that cannot be done, say why."""
    for class_name, method_name in _WAITERS:
        method = getattr(getattr(ring, class_name, None), method_name, None)
        if method is None:
            return f"{ring.__name__} has no {class_name}.{method_name}"
        if not _calls(method, _YIELD):
            return f"{class_name}.{method_name} does not call {_YIELD}"
    vars(ring)[_YIELD] = _nap
    if hasattr(ring, "SPINLOOP_EXT_ENABLED"):
        vars(ring)["SPINLOOP_EXT_ENABLED"] = False  # it spins for 0.1 s before each yield
    return None


def fork(platforms: ModuleType) -> str | None:
    """Have an engine on CPUs fork its processes, as vLLM does outside `vllm serve`; if that cannot be done, say why."""
    platform = platforms.current_platform
    if not platform.is_cpu() or _METHOD in _given():
        return None
    check = getattr(platform, _CHECK, None)
    if check is None:
        return f"{platforms.__name__} has no {_CHECK}"

    def checked(config: Any) -> None:
        check(config)
        os.environ[_METHOD] = "fork"

    setattr(platform, _CHECK, checked)
    return None


def _given(own: Path = Path("/proc/self/environ")) -> dict[str, str]:
    """The environment that this process began with: vLLM's command sets in its own what the operator did not."""
    pairs = (pair.partition("=") for pair in own.read_text(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _nap() -> None:
    time.sleep(NAP_S)


def _calls(method: Any, name: str) -> bool:
    """Does a function look `name` up among its module's globals when it runs?"""
    plain = getattr(method, "__wrapped__", method)  # `acquire_write` is a context manager's generator
    return isinstance(plain, FunctionType) and name in plain.__code__.co_names and name in plain.__globals__
