"""Switches on a mutant: one function, property or table entry of the production code is replaced.

Law: after the switch the original is back, whatever happened in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Switch = Callable[[], contextlib.AbstractContextManager[None]]


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
    try:
        yield
    finally:
        put(name, original)


def swap(owner: Any, name: Any, make: Callable[[Any], Any]) -> Switch:
    """Replace `owner.name` by `make(original)` while switched on."""

    def switch() -> contextlib.AbstractContextManager[None]:
        return _patched(owner, name, make(owner[name] if isinstance(owner, dict) else owner.__dict__[name]))

    return switch


def both(*switches: Switch) -> Switch:
    """All of them at once."""

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in switches:
                stack.enter_context(each())
            yield

    return switch
