"""Weights that are replaced while an engine runs: nothing that was computed with the old ones is handed over as new.

vLLM's calls that replace weights go through its engine core, on the scheduler's thread; they are watched there. Each
begins an epoch: what was granted or is on its way ends, cached blocks are forgotten, and from then on every digest of
content holds a text that stands for the new weights. P and D agree again once that text is the same on both: that of
the files, after `reload_weights`; of the version that the operator names (`weight_version`), after an update by a
trainer. Until then it is one that only this process has: its KV is shared with nobody, and D computes.

Laws: P and D each have their own text, and neither is told the other's (rule 2). Only the scheduler's thread is here.
A call that fails half way has replaced weights too. A request keeps the text of the time when its handoff is begun.
What is computed after a replacement for one that began before it is handed over by nobody, also where the weights of
then are back: a text may come again, and the number of an epoch does not. Nothing here raises into vLLM.
"""

from __future__ import annotations

import functools
import importlib
import logging
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbaton.engines.shared.weights_digest import weights_digest
from kvbaton.engines.side.guard import guarded, returns

log = logging.getLogger(__name__)

REPLACING = frozenset(
    {"reload_weights", "update_weights", "start_weight_update", "finish_weight_update", "reset_weights", "load_model"}
)
"""Methods of a worker, as `collective_rpc` names them. Whoever replaces weights by other means calls `replaced`."""
DISCARDS_LEVEL = 2
"""Of sleep: from here on the weights are thrown away."""
_CORE = "vllm.v1.engine.core"
_MARK = "_kvbaton_watched"
_FIELD = "kvbaton_weights"
_SINCE = "kvbaton_weights_since"
_engines: weakref.WeakSet[WeightsEpoch] = weakref.WeakSet()


class WeightsEpoch:
    """Of one engine: which weights its KV is of, beyond its compatibility key."""

    def __init__(self, files: str = "") -> None:
        """`files`: where the weights of the start lie; a reload without a path is from there."""
        self.text = ""  # as at the start: the key has them
        self.count = 0
        self._files = files
        self._live: Callable[[], Any] = lambda: None

    def watch(self, live: Callable[[], Any]) -> None:
        """From now on; `live` gives what is to be let go of: P's and D's halves, the store's, the door, the pool."""
        self._live = live
        _engines.add(self)
        watch_core()

    def mark(self, request: Any) -> None:
        """A request came, of which nothing is computed yet: its KV will be of these weights."""
        if self.count:
            setattr(request, _FIELD, self.text)
            setattr(request, _SINCE, self.count)

    def is_of(self, request: Any) -> bool:
        """Whether all of a request's KV is of the weights of now."""
        return bool(getattr(request, _SINCE, 0) == self.count)

    @guarded(returns(None))
    def begin(self, text: str = "") -> None:
        """Other weights from now on; without a text, nobody else can have them."""
        self.text = text or f"only here {secrets.token_hex(8)}"
        self.count += 1
        said = text or "nobody else, until a weight version is named"
        log.warning(
            "[weights-replaced] kvbaton: weights were replaced (%d so far); KV is shared with %s", self.count, said
        )
        live = self._live()
        if live is not None:
            loads, store = live.voided, live.stored.reset
            for let_go in (live.prefill.voided, loads, store, live.door.cache_replaced, live.pool.forget_cached):
                _each(let_go)

    def begin_again(self) -> None:
        """The weights are the same, and what was computed until now is handed over by nobody all the same."""
        self.count += 1

    def named(self, version: str) -> None:
        """The operator says what the weights are: engines of the same name share KV from here on."""
        if self.count and self.text != f"version {version}":
            self.begin(f"version {version}")

    def text_of(self, method: str, told: dict[str, Any]) -> str:
        """Of a reload from files, the digest of these; of any other, nothing that another engine could know."""
        place = str(told.get("weights_path") or self._files)
        if method != "reload_weights" or told.get("weights_iterator") is not None or not Path(place).exists():
            return ""
        try:
            return f"files {weights_digest(place, None)}"
        except (OSError, ValueError):
            return ""


@guarded(returns(None))
def _each(let_go: Callable[[], Any]) -> None:
    """One that fails does not keep the others from being done."""
    let_go()


def salted(request: Any) -> str:
    """A request's salt with its weights in it; as it is, while they are those of the start."""
    text, salt = getattr(request, _FIELD, ""), request.cache_salt or ""
    return f"weights {text}\0{salt}" if text else salt


def replaced(text: str = "") -> None:
    """For programs with means of their own to replace weights: in the engine core's process, on its thread.

    `text` names the weights; engines that were told the same one share KV.
    """
    for each in list(_engines):
        each.begin(text)


@guarded(returns(None))
def watch_core() -> None:
    """Watch vLLM's engine core, once a process; what it has no method for is not watched."""
    core = importlib.import_module(_CORE).EngineCore
    if not getattr(core, _MARK, False):
        setattr(core, _MARK, True)
        for name, heard in (("collective_rpc", _on_call), ("set_weight_version", _on_name), ("sleep", _on_sleep)):
            if hasattr(core, name):
                setattr(core, name, _watched(getattr(core, name), heard))


def _watched(genuine: Callable[..., Any], heard: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(genuine)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return genuine(self, *args, **kwargs)
        finally:
            heard(*args, **kwargs)

    return call


@guarded(returns(None))
def _on_call(method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
    if isinstance(method, str) and method in REPLACING:
        for each in list(_engines):
            each.begin(each.text_of(method, kwargs or {}))


@guarded(returns(None))
def _on_name(weight_version: str) -> None:
    for each in list(_engines):
        each.named(str(weight_version))


@guarded(returns(None))
def _on_sleep(level: int = 1, mode: str = "") -> None:
    if level >= DISCARDS_LEVEL:
        replaced()
