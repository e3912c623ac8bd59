"""A join token: the text that lets a process become a member.

    kvbt1-BASE64URL(token id 8 | secret 32 | the door's CURVE public key 32 | check 4)

Laws: the text is read from a file that only its user can read, or from the environment; no error, `repr` or log line
holds any part of the secret. The secret itself never crosses the network: a member sends a proof that is good for one
CURVE key, name and role, to the door whose key the token names.

A membership certificate: which CURVE key has which name and role, until when, signed by the cluster's admission key.

    signature 64 | msgpack [name, public, role, token, until, signing, since]    Ed25519 over a prefix and the rest

Laws: `verified` returns a `Membership` or raises `CertificateFault`, whatever the bytes; past it every field is within
its bounds. There is one spelling of each membership, so equal memberships have equal certificates. Whether one has
expired is judged by those who learn of it, when they do; a pair that knows each other needs no clock. Of a member of a
release that did not sign the last two are missing.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from zmq.utils import z85

from kvbaton.control.addressing import ControlError
from kvbaton.control.key_files import is_open, is_public_key
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


PREFIX = "kvbt1-"
TOKEN_ENV = "KVBATON_JOIN_TOKEN"
ID_BYTES, SECRET_BYTES, DOOR_BYTES, CHECK_BYTES = 8, 32, 32, 4
TEXT_CHARS_MAX = 256
PROOF_BYTES = 32
_BYTES = ID_BYTES + SECRET_BYTES + DOOR_BYTES + CHECK_BYTES
_NEXT = "make one with: kvbaton keys token new DIR --role ROLE"


class JoinToken(msgspec.Struct, frozen=True):
    """One token, as its holder has it."""

    id: str  # hex
    secret: bytes
    door: str  # Z85

    @classmethod
    def new(cls, door: str) -> JoinToken:
        return cls(secrets.token_hex(ID_BYTES), secrets.token_bytes(SECRET_BYTES), door)

    @classmethod
    def parse(cls, text: str, where: str) -> JoinToken:
        """From its text; ControlError names `where` it was found and what is wrong, never the text."""
        said = text.strip()
        if not said.startswith(PREFIX) or len(said) > TEXT_CHARS_MAX:
            raise ControlError(f"{where}: not a join token ({PREFIX}…); {_NEXT}")
        body = said.removeprefix(PREFIX)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ControlError(f"{where}: the join token has characters that none has; copy it again whole") from None
        if len(data) != _BYTES or not hmac.compare_digest(data[-CHECK_BYTES:], _check(data[:-CHECK_BYTES])):
            raise ControlError(f"{where}: the join token is incomplete or mistyped; copy it again whole")
        token_id, secret = data[:ID_BYTES], data[ID_BYTES : ID_BYTES + SECRET_BYTES]
        door = data[ID_BYTES + SECRET_BYTES : -CHECK_BYTES]
        return cls(token_id.hex(), secret, z85.encode(door).decode())

    @property
    def text(self) -> str:
        data = bytes.fromhex(self.id) + self.secret + z85.decode(self.door.encode())
        return PREFIX + base64.urlsafe_b64encode(data + _check(data)).rstrip(b"=").decode()

    @property
    def key(self) -> bytes:
        """What proofs are made and checked with; the secret cannot be had from it."""
        return hmac.digest(self.secret, b"kvbaton join key 1", "sha256")

    def __repr__(self) -> str:
        return f"JoinToken({self.id!r})"

    __str__ = __repr__

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.id)]


def proof(key: bytes, public: str, name: str, role: Role) -> bytes:
    """That the holder of this CURVE key may be a member by this name, in this role. The fields cannot be confused:
    the first has a fixed length, and neither of the others can hold the separator."""
    said = "\n".join(("kvbaton join 1", public, name, role.value)).encode()
    return hmac.digest(key, said, "sha256")


def token_from(path: str, inline: str = "", environ: Mapping[str, str] = os.environ) -> JoinToken | None:
    """The token that a process was given: a file, a text, or the environment; None if there is none."""
    if path:
        return JoinToken.parse(_read(Path(path)), path)
    if inline:
        return JoinToken.parse(inline, "join_token")
    return JoinToken.parse(environ[TOKEN_ENV], TOKEN_ENV) if environ.get(TOKEN_ENV) else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            told = os.fstat(file.fileno())
            if is_open(told):
                mode = stat.S_IMODE(told.st_mode)
                raise ControlError(f"{path} has mode {mode:04o}: others could read it; chmod 600 it")
            return file.read(2 * TEXT_CHARS_MAX).decode("ascii", "replace")
    except FileNotFoundError:
        raise ControlError(f"{path} is missing; {_NEXT} --out {path}") from None
    except OSError as error:
        raise ControlError(f"{path}: {error.strerror}; make it readable for this user") from None


def _check(data: bytes) -> bytes:
    """Against typing errors; it protects nothing."""
    return hashlib.blake2b(data, digest_size=CHECK_BYTES, person=b"kvbaton-join").digest()
