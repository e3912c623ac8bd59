"""Whose values count: who this engine writes as, and whose signatures it believes.

Laws: a value counts only if a member of now that may grant has signed it, by a key of now, and if nobody was removed on
whose KV it may be computed (its origins; `origins.mark_of`). Names are 8 bytes of a hash. A store that was given no
trust believes this process alone.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WRITER_BYTES = 8
SIGNATURE_BYTES = 64
SIGNED_MAX = 4096


def writer_id(origin: str) -> bytes:
    """A member as values name their writer: by its name and key."""
    return hashlib.blake2b(origin.encode(), digest_size=WRITER_BYTES, person=b"kvbaton-writer").digest()


@dataclass(frozen=True, slots=True)
class StoreTrust:
    """One engine's, until its keys change."""

    me: bytes
    sign: Callable[[bytes], bytes] | None  # None: this engine may not grant, so its values are worth nothing
    writers: Mapping[bytes, tuple[bytes, ...]]  # members that may grant, with the keys by which they sign now
    check: Callable[[bytes, bytes, bytes], bool]  # (key, payload, signature)
    gone: frozenset[bytes] = frozenset()  # origins that were removed

    def believes(self, names: Sequence[bytes]) -> bool:
        """Whether a value may be used, if its writer has signed it; `names`: its writer, then its origins."""
        return bool(names) and names[0] in self.writers and self.gone.isdisjoint(names[1:])

    def has_signed(self, writer: bytes, payload: bytes, signature: bytes) -> bool:
        return any(_remembered(self.check, key, payload, signature) for key in self.writers.get(writer, ()))


@functools.lru_cache(maxsize=SIGNED_MAX)
def _remembered(check: Callable[[bytes, bytes, bytes], bool], key: bytes, payload: bytes, signature: bytes) -> bool:
    """One signature is of a whole batch of values."""
    return check(key, payload, signature)


def _alone() -> StoreTrust:
    key, me = secrets.token_bytes(32), secrets.token_bytes(WRITER_BYTES)

    def sign(payload: bytes) -> bytes:
        return hashlib.blake2b(payload, key=key, digest_size=SIGNATURE_BYTES).digest()

    return StoreTrust(me, sign, {me: (b"",)}, lambda _, payload, told: hmac.compare_digest(sign(payload), told))


ALONE = _alone()
