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
