"""How an engine comes by its keys: those that were minted for it, or those that it joins with.

Law: a key directory and a token are not mixed. `auto` is a name only for those who join: minted keys have theirs. It
says where a member runs, and no other process has it:

    pod, replica or host name [.dpI] - random tail

What is made is a valid `WorkerId`, never two times the same, and never of a kind that is kept for a role (`router…`,
`operator…`, `store…`). A restart is another name: the one before may still be listed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping

import msgspec

from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_client import JOIN_S, JoinedMember, JoinWish, doors_of
from kvbaton.control.joining.join_token import TOKEN_ENV, token_from
from kvbaton.control.keyring import Keyring, load
from kvbaton.protocol.ids import WORKER_ID_CHARS_MAX, WorkerId
from kvbaton.protocol.legality import Role, role_by_name

NEEDED = f"a key directory, or a join token: join_token_file, or {TOKEN_ENV} in the environment"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's keys come from, as its operator says; the token's text is in none of its errors."""

    name: str
    role: Role
    keys: str = ""
    registry: str = ""
    join_at: str = ""
    join_token_file: str = ""
    join_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.name!r}, {self.role.value})"


class Enrolment(msgspec.Struct, frozen=True):
    """Keys to begin with, and of an engine that joined what renews them."""

    keyring: Keyring
    member: JoinedMember | None = None


def is_auto(name: str) -> bool:
    """`auto`, or `auto.PART` of one of several processes of an engine."""
    return name == AUTO or name.startswith(f"{AUTO}.")


def enrolled(asked: Credentials, deadline_s: float = JOIN_S) -> Enrolment:
    """The keys of an engine; joins, and so may wait for a registry. ControlError says what the operator must do."""
    if asked.keys:
        if asked.join_token_file or asked.join_token:
            raise ControlError("join_token_file: there is a key directory too (keys); give one of the two")
        if is_auto(asked.name):
            raise ControlError(f"name: {AUTO} is for members that join; name the identity that was minted in keys")
        return Enrolment(load(asked.keys, asked.name))
    token = token_from(asked.join_token_file, asked.join_token)
    if token is None:
        raise ControlError(f"keys: this engine has none; give {NEEDED}")
    name = auto_name(asked.name.removeprefix(AUTO).lstrip(".")) if is_auto(asked.name) else asked.name
    member = JoinedMember.join(JoinWish(name, asked.role, token, doors_of(asked.registry, asked.join_at)), deadline_s)
    return Enrolment(member.keyring, member)


AUTO = "auto"
BASE_ENV = ("KVBATON_NAME_BASE", "POD_NAME", "HOSTNAME")
"""Where a platform says what this replica is called; the first that is there."""
TAIL_CHARS = 6
_TAIL = "bcdfghjklmnpqrstvwxz"  # no digits, which would read as a rank; no vowels, and so no words
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def auto_name(
    part: str = "",
    environ: Mapping[str, str] = os.environ,
    host: Callable[[], str] = socket.gethostname,
) -> WorkerId:
    """`part` tells processes of one engine apart, such as `dp1`."""
    base = next((environ[name] for name in BASE_ENV if environ.get(name)), "") or host() or "member"
    clean = _ODD.sub("-", base).strip("-._") or "member"
    if role_by_name(clean) is not Role.BOTH:
        clean = f"w-{clean}"
    end = (f".{part}" if part else "") + "-" + "".join(secrets.choice(_TAIL) for _ in range(TAIL_CHARS))
    return WorkerId(clean[: WORKER_ID_CHARS_MAX - len(end)].rstrip("-._") + end)
