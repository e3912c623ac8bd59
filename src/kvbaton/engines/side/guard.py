"""Nothing leaves a hook: vLLM answers an exception with the death of the engine and of every request in it.

Law: a guarded hook returns what the engine can live with, and what it failed at is counted and logged (the first few
of each kind, with a traceback: each is a bug of kvbaton).
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

LOGGED_MAX = 5
faults: Counter[str] = Counter()
"""By hook, of this process."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(fallback: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """A decorator for hooks. `fallback` gets the hook's own arguments and must not raise."""

    def decorate(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - promise 4
                note(hook.__name__, error)
                return fallback(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def note(where: str, error: Exception) -> None:
    faults[where] += 1
    if faults[where] <= LOGGED_MAX:
        log.error("[hook-failed] kvbaton: %s failed, %d so far; going on", where, faults[where], exc_info=error)


def log_beside_vllm() -> None:
    """Let kvbaton's own lines go where vLLM's go, unless somebody has arranged for them."""
    ours = logging.getLogger("kvbaton")
    if not ours.handlers:
        theirs = logging.getLogger("vllm")
        ours.handlers = list(theirs.handlers)
        if ours.level != (level := theirs.level or logging.INFO):
            ours.setLevel(level)  # clears what every logger of the process has cached
        ours.propagate = not ours.handlers


def returns(value: Any) -> Callable[..., Any]:
    """A fallback that answers always the same, unshared."""
    return lambda *_args, **_kwargs: value


def makes(make: Callable[[], Any]) -> Callable[..., Any]:
    """A fallback that answers with something new each time."""
    return lambda *_args, **_kwargs: make()
