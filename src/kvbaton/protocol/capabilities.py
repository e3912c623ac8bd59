"""Capabilities of a data plane. The protocol decides by capabilities, never by a transport's name."""

from __future__ import annotations

import msgspec


class Capabilities(msgspec.Struct, frozen=True):
    """Promises of one data plane."""

    name: str
    one_sided: bool  # the remote engine's process takes no part in a copy
    can_write: bool  # WRITE is offered at all
    can_fence: bool  # `fence` can shut one peer's writes out
    cancels: bool  # `cancel` brings a copy to rest; otherwise it rests when it pleases
    same_host: bool  # reaches only processes of this host
    device_kinds: tuple[str, ...] = ("cpu",)
    weaves: bool = False  # takes spans in product form (`Copy.weave`); every other gets them one by one
    enforces: bool = False  # a peer reaches only blocks that are lent to it now (`effects.Loan`), whatever it asks for
