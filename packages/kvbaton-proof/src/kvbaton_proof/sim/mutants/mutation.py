"""Switches on a mutant: one function, property or table entry of the production code is replaced.

Laws: after the switch the original is back, whatever happened in between. Memories of earlier results (`lru_cache`) are
emptied on both ways, but for this tool's own, of the code as it is written and of clean worlds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

PACKAGE = "kvbaton."
REMEMBERING = (PACKAGE, "kvbaton_proof.")
TOOL = __name__.rpartition(".")[0] + "."


class Switch(Protocol):
    """Turns a mutant on for the length of a `with`; knows which modules it changes."""

    @property
    def modules(self) -> tuple[str, ...]: ...

    def __call__(self) -> contextlib.AbstractContextManager[None]: ...


class Mutant(msgspec.Struct, frozen=True):
    """One wrong idea, switchable."""

    name: str
    rule: str
    story: str
    switch: Switch


@contextlib.contextmanager
def _patched(owner: Any, name: Any, replacement: Any) -> Iterator[None]:
    original = owner[name] if isinstance(owner, dict) else owner.__dict__[name]
    put = owner.__setitem__ if isinstance(owner, dict) else lambda key, value: setattr(owner, key, value)
    put(name, replacement)
    forget_results()
    try:
        yield
    finally:
        put(name, original)
        forget_results()


def forget_results() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(REMEMBERING) and not name.startswith(TOOL):
            for value in list(vars(module).values()):
                clear: Callable[[], None] | None = getattr(value, "cache_clear", None)
                if clear is not None:
                    clear()


class _Swap:
    def __init__(self, owner: Any, name: Any, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        scope = owner if isinstance(owner, dict) else vars(owner)
        module = scope.get("__module__") or scope.get("__name__", "")  # of a class, or a module; a table has neither
        self.modules = (module.removeprefix(PACKAGE),)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        owner, name = self._owner, self._name
        return _patched(owner, name, self._make(owner[name] if isinstance(owner, dict) else owner.__dict__[name]))


class _All:
    def __init__(self, switches: tuple[Switch, ...]) -> None:
        self._switches = switches
        self.modules = tuple(dict.fromkeys(module for switch in switches for module in switch.modules))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for switch in self._switches:
                stack.enter_context(switch())
            yield


def swap(owner: Any, name: Any, make: Callable[[Any], Any]) -> Switch:
    """Replace `owner.name` by `make(original)` while switched on."""
    return _Swap(owner, name, make)


def both(*switches: Switch) -> Switch:
    """All of them at once."""
    return _All(switches)
