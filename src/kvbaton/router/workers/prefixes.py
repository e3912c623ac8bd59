"""Prefix affinity: which workers have recently seen the beginning of a prompt, so that its KV may be in their cache.

A prompt is cut into pieces of equal length, each named by a hash of itself and all before it; a worker that served the
prompt is noted under each. Laws: memory is bounded (pieces, workers per piece; the longest unused go first); hashes are
keyed per process, and those that routers share with a key of the cluster, so no client can aim at another's; a wrong
guess costs time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from kvbaton.api.bodies import BodyKind
from kvbaton.protocol.ids import PeerId
from kvbaton.router.workers.worker_load import SHAPING

PIECE_BYTES = 256
PIECES_MAX = 256
"""Of one prompt; what comes later is not told apart."""
BEGINNING_BYTES = 4 * PIECE_BYTES
"""By which prompts that no one here has seen find their home: long enough to tell tenants apart."""
HOLDERS_MAX = 4
_encode = msgspec.json.Encoder().encode


def pieces(kind: BodyKind, fields: Mapping[str, Any], text: bytes | None = None) -> tuple[tuple[int, ...], int]:
    """The names of a prompt's beginnings, shortest first. What shapes the KV besides the text is in all of them."""
    text = prompt_text(kind, fields) if text is None else text
    # As texts: the hash of None is its address, which differs between the processes of one router
    name = hash((kind.value, repr(fields.get("model")), repr(fields.get("cache_salt"))))
    found = []
    for start in range(0, min(len(text), PIECE_BYTES * PIECES_MAX) - PIECE_BYTES + 1, PIECE_BYTES):
        name = hash((name, text[start : start + PIECE_BYTES]))
        found.append(name)
    return tuple(found), len(text) // PIECE_BYTES


def beginning(key: bytes, kind: BodyKind, fields: Mapping[str, Any], text: bytes) -> bytes:
    """A digest of a prompt's beginning that is the same at all routers with this key; b"" of a short prompt."""
    if len(text) < PIECE_BYTES:
        return b""
    shaping = _encode((kind.value, fields.get("model"), fields.get("cache_salt")))
    return blake2b(text[:BEGINNING_BYTES] + shaping, key=key[:64], digest_size=16, person=b"kvbaton home").digest()


def prompt_text(kind: BodyKind, fields: Mapping[str, Any]) -> bytes:
    """A prompt as one string of bytes, equal for equal prompts."""
    if kind is BodyKind.COMPLETION:
        prompt = fields.get("prompt")
        return prompt.encode() if isinstance(prompt, str) else _encode(prompt)
    return _encode([fields.get(name) for name in SHAPING[kind]])


class Prefixes:
    """Which workers have seen which beginnings."""

    def __init__(self, pieces_max: int) -> None:
        self._pieces_max = pieces_max
        self._holders: OrderedDict[int, tuple[PeerId, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def share(self, names: Sequence[int], total: int) -> dict[PeerId, float]:
        """The part of the prompt, 0 to 1, that each worker has seen."""
        seen: dict[PeerId, int] = {}
        for before, name in enumerate(names):
            holders = self._seen_by(name)
            if holders is None:
                break
            for peer in holders:
                if seen.get(peer, 0) == before:  # all that came earlier, too
                    seen[peer] = before + 1
        return {peer: count / total for peer, count in seen.items()}

    def _seen_by(self, name: int) -> tuple[PeerId, ...] | None:
        return self._holders.get(name)

    def note(self, peer: PeerId, names: Sequence[int]) -> None:
        """A worker has served the prompt."""
        for name in names:
            others = [known for known in self._holders.get(name, ()) if known != peer]
            self._holders[name] = (peer, *others[: HOLDERS_MAX - 1])
            self._holders.move_to_end(name)
        while len(self._holders) > self._pieces_max:
            self._holders.popitem(last=False)
