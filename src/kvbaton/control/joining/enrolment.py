"""How an engine comes by its keys: those that were minted for it, or those that it joins with.

Law: a key directory and a token are not mixed. `auto` is a name only for those who join: minted keys have theirs.
"""

from __future__ import annotations

import msgspec

from kvbaton.control.addressing import ControlError
from kvbaton.control.joining.join_client import JOIN_S, JoinedMember, JoinWish, doors_of
from kvbaton.control.joining.join_token import TOKEN_ENV, token_from
from kvbaton.control.joining.member_names import AUTO, auto_name
from kvbaton.control.keyring import Keyring, load
from kvbaton.protocol.privileges import Role

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
