"""What a key directory holds for members that join, and who is let in by it.

    DIR/admission.json         {"seed": hex, "door": z85}      only where registries run; mode 0600; signs certificates,
                               and is the secret key of every join door of the cluster
    DIR/public-admission.json  {"admission": hex}              copied to every host; checks certificates
    DIR/tokens/ID.json         a token's role, expiry and uses, and the key that checks its proofs; mode 0600
    DIR/joined/NAME.json       who joined, with the certificate; of one that was removed a tombstone, for as long as its
                               certificate could be presented

Laws: the text of a token is told once, when it is made, and is not in any file. A joined file proves nothing that its
signature does not: write access to `joined/` is no membership. All is written under the directory's lock.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from msgspec import Meta

from kvbaton.control import key_files as files
from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_token import (
    LIFE_S,
    SEED_BYTES,
    SKEW_S,
    Certificate,
    CertificateFault,
    JoinToken,
    Membership,
    admission_public,
    verified,
)
from kvbaton.protocol.ids import WorkerId, is_worker_id
from kvbaton.protocol.legality import Role

TOKENS_MAX = 1024
JOINED_MAX = 4096
USES_MAX = 1_000_000
EXPIRES_S_MAX = 366 * 86_400.0

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class AdmissionSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registry's."""

    seed: Hex32
    door: files.Key

    def __repr__(self) -> str:
        return "AdmissionSecret(…)"


class TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token, as registries know it."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    key: Hex32  # checks proofs
    role: Role
    expires: float  # wall clock
    uses_max: Annotated[int, Meta(ge=0, le=USES_MAX)]  # 0: as many as come
    uses: Annotated[int, Meta(ge=0)] = 0
    revoked: bool = False
    members_out: bool = False  # and so are those who came by it

    def __repr__(self) -> str:
        return f"TokenFile({self.id!r}, {self.role.value}, uses={self.uses})"


class JoinedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A member that joined. Only the certificate counts; the rest is for people."""

    name: str
    public: files.Key
    role: Role
    token: str
    until: int
    certificate: Certificate
    removed: bool = False

    @classmethod
    def of(cls, member: Membership, certificate: bytes) -> JoinedFile:
        return cls(member.name, member.public, member.role, member.token, member.until, certificate)


# --- the admission key


def admission_secret(base: Path) -> AdmissionSecret | None:
    """The secret of a directory where tokens were made; None elsewhere."""
    path = base / "admission.json"
    return files.read(path, AdmissionSecret, private=True) if path.exists() else None


def ensure_admission(base: Path) -> AdmissionSecret:
    """The admission key, made now if there is none. Under the directory's lock."""
    found = admission_secret(base)
    if found is None:
        if (base / "public-admission.json").exists():
            raise ControlError(f"{base}: admission.json is not here; make tokens where the cluster's registries run")
        _, door = zmq.curve_keypair()
        found = AdmissionSecret(secrets.token_hex(SEED_BYTES), door.decode())
        files.write(base / "admission.json", found)
    if not (base / "public-admission.json").exists():
        public = admission_public(bytes.fromhex(found.seed)).hex()
        files.write(base / "public-admission.json", files.PublicAdmission(public))
    return found


# --- tokens


def new_token(
    directory: str | Path, role: Role, expires_s: float, uses_max: int, wall: Callable[[], float] = time.time
) -> JoinToken:
    """A token for members of one role; `both` also lets in prefill and decode alone. Its text is told only now."""
    base = files.existing(directory)
    if not 1.0 <= expires_s <= EXPIRES_S_MAX:
        raise ControlError(f"expires: got {expires_s:g} s, expected 1 to {EXPIRES_S_MAX:g}")
    if not 0 <= uses_max <= USES_MAX:
        raise ControlError(f"uses: got {uses_max}, expected 0 (any number) to {USES_MAX}")
    with files.locked(base):
        secret = ensure_admission(base)
        (base / "tokens").mkdir(mode=0o700, exist_ok=True)
        in_use = {each.token for each in joined_files(base)}
        for old in tokens(base):
            # Who came by it stays when it has expired, and may still be in another registry's files
            if old.id not in in_use and wall() > old.expires + LIFE_S + SKEW_S:
                (base / "tokens" / f"{old.id}.json").unlink(missing_ok=True)
        if len(list((base / "tokens").glob("[!.]*.json"))) >= TOKENS_MAX:
            raise ControlError(f"{base}: {TOKENS_MAX} tokens are the most; those that expired go by themselves")
        token = JoinToken.new(files.public_of(secret.door, base / "admission.json"))
        kept = TokenFile(token.id, token.key.hex(), role, wall() + expires_s, uses_max)
        files.write(base / "tokens" / f"{token.id}.json", kept)
    return token


def token_file(base: Path, token_id: str) -> TokenFile | None:
    path = base / "tokens" / f"{token_id}.json"
    return files.read(path, TokenFile, private=True) if path.exists() else None


def tokens(base: Path) -> list[TokenFile]:
    return [files.read(path, TokenFile, private=True) for path in sorted((base / "tokens").glob("[!.]*.json"))]


def revoke_token(
    directory: str | Path, token_id: str, *, with_members: bool = False, wall: Callable[[], float] = time.time
) -> list[str]:
    """From now on it lets in nobody; returns who was removed with it."""
    base = files.existing(directory)
    with files.locked(base):
        if not token_id.isalnum() or (token := token_file(base, token_id)) is None:
            raise ControlError(f"{base}: there is no token {token_id[:16]!r}; see: kvbaton keys token list {base}")
        out = token.members_out or with_members
        expires = max(token.expires, wall())  # its file is kept until no certificate of who came by it can be presented
        put_token(base, msgspec.structs.replace(token, revoked=True, members_out=out, expires=expires))
        came = [each.name for each in joined_files(base) if with_members and each.token == token_id]
        return [name for name in came if _entomb(base, name)]


def put_token(base: Path, token: TokenFile) -> None:
    files.replace(base / "tokens" / f"{token.id}.json", token)


# --- who joined


def joined_file(base: Path, name: str) -> JoinedFile | None:
    path = base / "joined" / f"{name}.json"
    return files.read(path, JoinedFile, private=True) if path.exists() else None


def joined_files(base: Path) -> Iterator[JoinedFile]:
    """All that can be read; one that is gone by then, or wrong, is nobody's membership."""
    for path in sorted((base / "joined").glob("[!.]*.json"))[: 2 * JOINED_MAX]:
        with contextlib.suppress(ControlError):
            yield files.read(path, JoinedFile, private=True)


def is_full(base: Path) -> bool:
    """Whether no further member can join. Tombstones have places of their own: they are read only where it matters."""
    files_here = sum(1 for _ in (base / "joined").glob("[!.]*.json"))
    if JOINED_MAX <= files_here < 2 * JOINED_MAX:
        return sum(not each.removed for each in joined_files(base)) >= JOINED_MAX
    return files_here >= JOINED_MAX


def members(joined: Iterable[JoinedFile], admission: bytes, wall: float) -> dict[WorkerId, Membership]:
    """Who joined and is still a member, by certificates that verify."""
    found: dict[WorkerId, Membership] = {}
    for each in joined if admission else ():
        with contextlib.suppress(CertificateFault):
            member = verified(each.certificate, admission)
            if not each.removed and member.name == each.name and not member.is_over(wall):
                found[member.name] = member
    return found


def put_joined(base: Path, member: Membership, certificate: bytes) -> None:
    (base / "joined").mkdir(mode=0o700, exist_ok=True)
    files.replace(base / "joined" / f"{member.name}.json", JoinedFile.of(member, certificate))


def remove_joined(directory: str | Path, name: str) -> bool:
    """Take a member that joined off the list; False when there is none of that name. Its name is not given again
    before its certificate has expired."""
    base = files.existing(directory)
    with files.locked(base):
        return is_worker_id(name) and _entomb(base, name)


def sweep(base: Path, wall: float) -> int:
    """Forget members and tombstones whose certificates have expired; returns how many."""
    count = 0
    with files.locked(base):
        for each in list(joined_files(base)):
            if wall > each.until + 2 * SKEW_S:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(base / "joined" / f"{each.name}.json")
                    count += 1
    return count


def _entomb(base: Path, name: str) -> bool:
    found = joined_file(base, name)
    if found is None or found.removed:
        return False
    until = int(max(found.until, time.time() + LIFE_S))  # it may have been renewed since this was written
    files.replace(base / "joined" / f"{name}.json", msgspec.structs.replace(found, removed=True, until=until))
    return True
