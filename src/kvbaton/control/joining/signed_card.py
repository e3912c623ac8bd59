"""The cluster's card as registries pass it on: signed by the admission key, so that none of them can change it.

    signature 64 | msgpack ClusterCard

Laws: `opened` returns a card within its bounds or raises `JoinFault`, whatever the bytes. A registry without the
admission key can withhold a card or repeat one; `at` says which of two is the later, and no member goes back.
"""

from __future__ import annotations

import functools
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.control.joining.join_messages import ClusterCard, JoinFault, check_card
from kvbaton.control.signing import SIGNATURE_BYTES, Signer, verify

CARD_BYTES_MAX = 512 << 10
SignedCard = Annotated[bytes, Meta(max_length=CARD_BYTES_MAX)]
_CONTEXT = "cluster card 1"


@functools.lru_cache(maxsize=4)
def signed(card: ClusterCard, seed: bytes) -> bytes:
    """Remembered: a registry tells the same with every answer."""
    body = _encoder.encode(card)
    return Signer.from_private(seed).sign(_CONTEXT, body) + body


@functools.lru_cache(maxsize=4)
def opened(data: bytes, admission: bytes) -> ClusterCard:
    """What it says, if the admission key has signed it."""
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if not body or not admission or not verify(_CONTEXT, admission, body, signature):
        raise JoinFault("card: not signed by this cluster's admission key")
    try:
        card = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise JoinFault(f"card: {error}") from None
    check_card(card)
    return card


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ClusterCard)
