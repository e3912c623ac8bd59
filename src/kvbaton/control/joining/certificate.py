"""A membership certificate: which CURVE key has which name and role, until when, signed by the cluster's admission key.

    signature 64 | msgpack [name, public, role, token, until, signing, since]    Ed25519 over a prefix and the rest

Laws: `verified` returns a `Membership` or raises `CertificateFault`, whatever the bytes; past it every field is within
its bounds. There is one spelling of each membership, so equal memberships have equal certificates. Whether one has
expired is judged by those who learn of it, when they do; a pair that knows each other needs no clock. Of a member of a
release that did not sign the last two are missing.
"""

from __future__ import annotations

import functools
from typing import Annotated

import msgspec
from msgspec import Meta

from kvbaton.control.key_files import is_public_key
from kvbaton.control.signing import SIGNATURE_BYTES, SIGNING_KEY_BYTES, Signer, has_signed
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, WorkerId, is_worker_id
from kvbaton.protocol.legality import Role

CERTIFICATE_BYTES_MAX = 384
SEED_BYTES = 32
LIFE_S = 3600.0
"""For how long a certificate is good; renewed when half of it is over."""
SKEW_S = 60.0
"""By which clocks of a cluster may differ: one that ran out this recently is still taken."""
_DOMAIN = b"kvbaton membership certificate 1\n"

Certificate = Annotated[bytes, Meta(max_length=CERTIFICATE_BYTES_MAX)]


class CertificateFault(Exception):
    """A certificate that proves nothing; the text says why."""


class Membership(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member, as its certificate says."""

    name: Annotated[WorkerId, Meta(max_length=WORKER_ID_CHARS_MAX)]
    public: Annotated[str, Meta(min_length=40, max_length=40)]
    role: Role
    token: Annotated[str, Meta(max_length=16)]  # id of the token that it came by; "": minted, and vouched for
    until: Annotated[int, Meta(ge=0, lt=1 << 40)]  # s, wall clock
    signing: Annotated[bytes, Meta(max_length=SIGNING_KEY_BYTES)] = b""  # the key by which it signs; b"": it cannot
    since: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0  # when this key was given the name: the first of two keeps it

    def is_over(self, wall: float) -> bool:
        return wall > self.until + SKEW_S


@functools.lru_cache(maxsize=8192)
def sign(membership: Membership, seed: bytes) -> bytes:
    """Remembered: a registry tells the same certificates with every list."""
    body = _spelled(membership)
    return _signer(seed).sign_bytes(_DOMAIN + body) + body


def admission_public(seed: bytes) -> bytes:
    """The key by which everybody checks what this seed signs."""
    return _signer(seed).public


@functools.lru_cache(maxsize=8192)
def verified(certificate: bytes, admission: bytes) -> Membership:
    """What it says, if the admission key has signed it; not whether it has expired."""
    if not SIGNATURE_BYTES < len(certificate) <= CERTIFICATE_BYTES_MAX:
        raise CertificateFault(f"certificate: {len(certificate)} bytes")
    signature, body = certificate[:SIGNATURE_BYTES], certificate[SIGNATURE_BYTES:]
    if not has_signed(admission, _DOMAIN + body, signature):
        raise CertificateFault("certificate: not signed by this cluster's admission key")
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CertificateFault(f"certificate: {error}") from None
    if len(found.signing) not in (0, SIGNING_KEY_BYTES):
        raise CertificateFault(f"certificate: a signing key of {len(found.signing)} bytes")
    if not is_worker_id(found.name) or not is_public_key(found.public) or _spelled(found) != body:
        raise CertificateFault("certificate: not in its one spelling")
    return found


def _spelled(membership: Membership) -> bytes:
    fields = msgspec.structs.astuple(membership)
    return _encoder.encode(fields if membership.signing else fields[:5])


@functools.lru_cache(maxsize=8)
def _signer(seed: bytes) -> Signer:
    return Signer.from_private(seed)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Membership)
