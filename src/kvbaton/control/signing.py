"""What a member signs: statements and values that others check whoever brings them.

    signature = Ed25519 over  "kvbaton signed\n" context "\n" payload

Laws: a member's signing key is derived from its CURVE secret (HKDF-SHA256 with an info string of its own), so there is
no further secret to keep, and who has one has both. A signature counts in one context only: one of a registration is
worth nothing beside a value of the store. `verify` says yes or no, whatever the bytes. No secret appears in a `repr`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from zmq.utils import z85

SIGNING_KEY_BYTES = 32
SIGNATURE_BYTES = 64
SAID_BYTES_MAX = 8 << 10
_INFO = b"kvbaton signing key 1"
_DOMAIN = b"kvbaton signed\n"


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """Something signed, as it travels: whoever passes it on need not understand it."""

    said: Annotated[bytes, Meta(max_length=SAID_BYTES_MAX)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Signer:
    """One member's signing key."""

    __slots__ = ("_private", "public")

    def __init__(self, private: Any) -> None:
        self._private = private
        raw = importlib.import_module("cryptography.hazmat.primitives.serialization")
        self.public = bytes(private.public_key().public_bytes(raw.Encoding.Raw, raw.PublicFormat.Raw))

    @classmethod
    def of(cls, secret: str) -> Signer:
        """The signing key of the holder of this CURVE secret (Z85)."""
        hkdf = importlib.import_module("cryptography.hazmat.primitives.kdf.hkdf")
        hashes = importlib.import_module("cryptography.hazmat.primitives.hashes")
        derive = hkdf.HKDF(algorithm=hashes.SHA256(), length=SIGNING_KEY_BYTES, salt=None, info=_INFO)
        return cls(_ed25519().Ed25519PrivateKey.from_private_bytes(derive.derive(z85.decode(secret.encode()))))

    @classmethod
    def from_private(cls, raw: bytes) -> Signer:
        """The signer of a process that has a member's signing key, and not its CURVE secret: a rank of its engine."""
        return cls(_ed25519().Ed25519PrivateKey.from_private_bytes(raw))

    @property
    def private(self) -> bytes:
        return bytes(self._private.private_bytes_raw())

    def sign(self, context: str, payload: bytes) -> bytes:
        return self.sign_bytes(_said(context, payload))

    def sign_bytes(self, data: bytes) -> bytes:
        """For formats with a prefix of their own."""
        return bytes(self._private.sign(data))

    def __repr__(self) -> str:
        return f"Signer({self.public.hex()[:16]}…)"


def verify(context: str, public: bytes, payload: bytes, signature: bytes) -> bool:
    """Whether the holder of the signing key `public` has signed `payload` in that context."""
    return has_signed(public, _said(context, payload), signature)


def has_signed(public: bytes, data: bytes, signature: bytes) -> bool:
    """The same, of what `Signer.sign_bytes` was given."""
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
    try:
        _public(public).verify(signature, data)
    except (invalid, ValueError):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _public(public: bytes) -> Any:
    return _ed25519().Ed25519PublicKey.from_public_bytes(public)


def _said(context: str, payload: bytes) -> bytes:
    """A context holds no line break, so no two pairs of context and payload are the same bytes."""
    if "\n" in context:
        raise ValueError(f"context: got {context!r}, expected one line")
    return _DOMAIN + context.encode() + b"\n" + payload


def _ed25519() -> Any:
    """When the first signature is made or seen: commands that see none start sooner."""
    return importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
