"""False writes: of what is to be written less, elsewhere, or nothing whole; whoever asked for it is told that all is.

Law: pure; a copy gives a copy. No more is written than was asked for, and only to places that were named.
"""

from __future__ import annotations

from array import array

import msgspec

from kvbaton.protocol.effects import Copy


def _with(copy: Copy, spans: array[int]) -> Copy:
    return msgspec.structs.replace(copy, spans=spans)


def half(copy: Copy) -> Copy:
    """The first half of its spans; of a single one, of its bytes."""
    if len(copy.spans) > 3:
        return _with(copy, copy.spans[: len(copy.spans) // 6 * 3])
    local, remote, size = copy.spans
    return _with(copy, array("q", [local, remote, max(1, size // 2)]))


def all_but_one(copy: Copy, skipped: int) -> Copy:
    """All spans but that one."""
    return _with(copy, copy.spans[: 3 * skipped] + copy.spans[3 * skipped + 3 :])


def all_but_a_byte(copy: Copy) -> Copy:
    spans = copy.spans[:]
    spans[-1] -= 1
    return _with(copy, spans)


def none_whole(copy: Copy) -> Copy:
    """Of every span all but a byte."""
    return _with(copy, array("q", [number - (at % 3 == 2) for at, number in enumerate(copy.spans)]))


def in_one_place(copy: Copy) -> Copy:
    """As many spans as were asked for, all of them to the first place."""
    spans = array("q", [copy.spans[1] if at % 3 == 1 else number for at, number in enumerate(copy.spans)])
    spans[2::3] = array("q", [min(spans[2::3])] * (len(spans) // 3))
    return _with(copy, spans)
