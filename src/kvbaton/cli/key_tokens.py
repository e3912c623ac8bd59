"""`kvbaton keys token`: tokens by which members join by themselves.

Laws: the text of a token is printed once, when it is made, or written to a file that only its user can read; nothing
else prints it. What is changed here is in force at once: registries read the files at each knock.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kvbaton.cli.arguments import whole
from kvbaton.control import key_files
from kvbaton.control.joining import admission_files
from kvbaton.control.key_room import TokenView, tokens
from kvbaton.control.keyring import LOOK_S
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.legality import Role

ACTIONS = ("new", "list", "revoke")
DAY_S = 86_400.0
AFTERMATH = (
    "engines that took KV from it, or from others that did, then reset their prefix caches at their next step, and "
    "values that it put into the store count as missing; answers given, or begun, before that may be wrong"
)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}


def duration(text: str) -> float:
    """An argument type: 90s, 15m, 12h, 30d."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"got {text[:40]!r}, expected such as 90s, 15m, 12h, 30d")
    return int(match[1]) * _UNITS[match[2]]


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--role",
        choices=list(Role),
        default=None,
        help="with new: what members that join by it are for; both (default) also lets in prefill or decode alone",
    )
    group.add_argument(
        "--expires", type=duration, default=None, metavar="TIME", help="with new: good for (default 24h)"
    )
    group.add_argument(
        "--uses",
        type=whole(0, admission_files.USES_MAX),
        default=None,
        metavar="N",
        help="with new: how many members may join by it, 0 for any number (default)",
    )
    group.add_argument("--out", default=None, metavar="FILE", help="with new: write the token there, mode 0600")
    group.add_argument("--with-members", action="store_true", help="with revoke: also remove who joined by it")


def check_unused(args: argparse.Namespace) -> None:
    for flag in ("role", "expires", "uses", "out", "with_members"):
        if getattr(args, flag) not in (None, False):
            raise CommandError(f"argument --{flag.replace('_', '-')}: only with token; see: kvbaton keys --help")


def run(args: argparse.Namespace) -> int:
    """Runs `token new DIR`: the parser sees `new` as the directory, and DIR as the first name."""
    action, names = args.directory, list(args.names)
    if action not in ACTIONS or not names:
        raise CommandError(f"argument ACTION: expected token {'|'.join(ACTIONS)} DIR; see: kvbaton keys --help")
    args.directory, args.names = names[0], names[1:]
    made = [flag for flag in ("role", "expires", "uses", "out") if getattr(args, flag) is not None]
    if (made and action != "new") or (args.with_members and action != "revoke"):
        flag = made[0] if made and action != "new" else "with-members"
        raise CommandError(f"argument --{flag}: not with token {action}; see: kvbaton keys --help")
    if (action == "revoke") != bool(args.names):
        expected = "give the ID of at least one" if action == "revoke" else f"token {action} takes none"
        raise CommandError(f"argument ID: {expected}; see: kvbaton keys token list {args.directory}")
    actions: dict[str, Callable[[argparse.Namespace], int]] = {"new": _new, "list": _list, "revoke": _revoke}
    return actions[action](args)


def _new(args: argparse.Namespace) -> int:
    role = Role(args.role or Role.BOTH)
    if args.out and Path(args.out).exists():
        raise CommandError(f"argument --out: {args.out} exists; give another file, or remove it")
    life_s = args.expires or DAY_S
    token = admission_files.new_token(args.directory, role, life_s, args.uses or 0)
    if args.out:
        try:
            fd = os.open(args.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                file.write(token.text + "\n")
        except OSError as error:
            admission_files.revoke_token(args.directory, token.id)
            raise CommandError(f"argument --out: {args.out}: {error.strerror}; the token was revoked") from None
    told = {"action": "token new", "dir": args.directory, "id": token.id, "role": role.value, "expires_s": life_s}
    told |= {"uses_max": args.uses or 0, **({"file": args.out} if args.out else {"token": token.text})}
    if args.json:
        print(msgspec.json.encode(told).decode())
        return 0
    print(f"token {token.id}: {role.value}, good for {span(life_s)}, {_count(args.uses or 0)}")
    where = f"--join-token-file {args.out}" if args.out else "--join-token-file FILE, which holds:"
    print(f"next: kvbaton worker --name auto {where}", *([] if args.out else [token.text]), sep="\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    found = tokens(key_files.existing(args.directory))
    if args.json:
        print(msgspec.json.encode({"dir": args.directory, "tokens": found}).decode())
    else:
        print("\n".join(lines(found)))
    return 0


def _revoke(args: argparse.Namespace) -> int:
    gone: list[str] = []
    for token in args.names:
        gone += admission_files.revoke_token(args.directory, token, with_members=args.with_members)
    did = [f"revoked {', '.join(args.names)}: nobody joins by it any more"]
    then = ["the same in every registry's key directory that is not this one"]
    if args.with_members:
        did.append(f"removed {', '.join(gone) or 'nobody'}")
    if gone:
        did[-1] += f"; registries reject it within {LOOK_S:g} s, and tell all workers, on other hosts too"
        did.append(AFTERMATH)
        then.append(f"it has read the ticket keys: kvbaton keys rotate {args.directory} --tickets")
    if args.json:
        told = {"action": "token revoke", "dir": args.directory, "ids": args.names, "removed": gone}
        print(msgspec.json.encode({**told, "did": did, "next": then}).decode())
    else:
        print("\n".join([*did, *(f"next: {each}" for each in then)]))
    return 0


def lines(found: Iterable[TokenView]) -> list[str]:
    """Tokens as `list` and `show` print them."""
    told = list(found)
    said = [f"{len(told)} join tokens"]
    for each in told:
        uses = f"{each.uses} of {each.uses_max} uses" if each.uses_max else f"{each.uses} uses"
        left = f", for another {span(each.left_s)}" if each.state == "good" else ""
        said.append(f"  {each.id}  {each.role}, {each.state}{left}, {uses}")
    return said


def span(age_s: float) -> str:
    """A duration in the unit that fits."""
    for unit, size_s in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def _count(uses: int) -> str:
    return f"for {uses} members" if uses else "for any number of members"
