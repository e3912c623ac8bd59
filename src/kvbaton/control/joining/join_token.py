"""A join token: the text that lets a process become a member.

    kvbt1-BASE64URL(token id 8 | secret 32 | the door's CURVE public key 32 | check 4)

Laws: the text is read from a file that only its user can read, or from the environment; no error, `repr` or log line
holds any part of the secret. The secret itself never crosses the network: a member sends a proof that is good for one
CURVE key, name and role, to the door whose key the token names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec
from zmq.utils import z85

from kvbaton.control.addressing import ControlError
from kvbaton.control.key_files import is_open
from kvbaton.protocol.legality import Role

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
