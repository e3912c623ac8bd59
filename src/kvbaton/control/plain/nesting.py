"""How deeply a msgpack message is nested, without decoding it.

Law: the answer depends on the bytes alone. Decoders stop where their interpreter's recursion limit is, which differs
from one Python to the next; what a peer may send does not. Linear in the message's length, and never raises.
"""

from __future__ import annotations

_SIZES = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,  # numbers
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,  # extensions of a fixed size
}  # fmt: skip
_LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_LENGTHS |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""Bytes of the length, and bytes besides the contents: binaries, extensions, texts."""
_COUNTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count, and values to each of it: lists, maps."""


def is_nested_within(message: bytes, most: int) -> bool:
    """Whether no value lies in more than `most` lists and maps; of a message that is cut short, as far as it goes."""
    left = [1]  # values still to come, of each list or map that is open
    at = 0
    while left:
        if not left[-1]:
            left.pop()
            continue
        if at >= len(message):
            return True
        left[-1] -= 1
        kind, at = message[at], at + 1
        if 0x80 <= kind <= 0x9F:  # short maps and lists
            left.append((kind & 0x0F) * (2 if kind < 0x90 else 1))
        elif kind in _COUNTS:
            size, each = _COUNTS[kind]
            left.append(each * int.from_bytes(message[at : at + size], "big"))
            at += size
        elif kind in _LENGTHS:
            size, besides = _LENGTHS[kind]
            at += size + besides + int.from_bytes(message[at : at + size], "big")
        elif 0xA0 <= kind <= 0xBF:  # short texts
            at += kind & 0x1F
        else:
            at += _SIZES.get(kind, 0)
        if len(left) - 1 > most:
            return False
    return True
