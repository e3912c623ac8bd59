"""The protocol versions that a node supports, and the version that a pair uses.

Law: a Hello is sent in the oldest version that its sender supports and names the newer ones by bits of its card, which
every version ignores; the Welcome's envelope settles the version: the newest that both support. A Hello and its refusal
keep their shape forever and are read in every version, so a peer with none in common is told so by name.
"""

from __future__ import annotations

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason

OLDEST, NEWEST = 1, 2
NUMBER_MAX = 16
"""The newest version that a card has a bit for."""
_BIT_OF_0 = 45


class Versions(msgspec.Struct, frozen=True):
    """A range of versions, both ends included."""

    oldest: int = OLDEST
    newest: int = NEWEST

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return named(range(self.oldest, self.newest + 1))

    @property
    def bits(self) -> int:
        """The bits of a card that name them. Version 1 has no bit: nodes with only that version did not know of any."""
        return sum(version_bit(number) for number in range(max(2, self.oldest), self.newest + 1))


SPOKEN = Versions()
"""The versions that this code speaks."""


def version_bit(number: int) -> int:
    return 1 << (_BIT_OF_0 + number)


def versions_in(bits: int) -> list[int]:
    """The versions that a card's bits name."""
    return [number for number in range(1, NUMBER_MAX + 1) if bits & version_bit(number)]


def settle(ours: Versions, greeted_in: int, bits: int) -> int:
    """The newest version that both we and the peer support, which said hello in `greeted_in` and names more by
    `bits`."""
    theirs = sorted({greeted_in, *versions_in(bits)})
    common = [number for number in theirs if number in ours]
    if not common:
        detail = f"version: the source speaks {ours}, the target {named(theirs)}; upgrade the older of the two first"
        raise ProtocolError(Reason.WRONG_VERSION, detail)
    return common[-1]


def named(numbers: range | list[int]) -> str:
    """`1`, or `1 to 2`."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
