"""Capabilities of a transport. The protocol decides by capabilities, never by a transport's name."""

from __future__ import annotations

import msgspec


class Capabilities(msgspec.Struct, frozen=True):
    """Promises of one transport."""

    name: str
    one_sided: bool  # the remote engine's process takes no part in a copy
    can_write: bool  # WRITE is offered at all
    can_fence: bool  # `fence` can shut out one peer's writes
    cancels: bool  # `cancel` brings a copy to rest; otherwise it rests at an unknown time
    same_host: bool  # reaches only processes of this host
    device_kinds: tuple[str, ...] = ("cpu",)
    weaves: bool = False  # accepts spans in product form (`Copy.weave`); others get them one by one
    enforces: bool = False  # a peer reaches only blocks that are lent to it now (`effects.Loan`)
    knows_writes: bool = False  # the same for writes at least; a loan for writing ends with what of it did not come

    admits: bool = False  # a peer gets at this memory, then at all of it, only once something was lent to it to read

    @property
    def takes_pushes(self) -> bool:
        """Whether a peer may write here; otherwise the receiver copies (rules 16 and 35)."""
        return self.can_write and self.can_fence and self.knows_writes

    @property
    def lends_reads(self) -> bool:
        """Whether a peer must be lent something before it can read."""
        return self.enforces or self.admits

    @property
    def lends_writes(self) -> bool:
        return self.enforces or self.knows_writes
