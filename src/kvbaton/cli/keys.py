"""`kvbaton keys`: the members of a cluster. Create, list, rotate and remove their keys while the cluster runs.

Law: a change takes effect in running processes within seconds, where they see the directory. A process keeps the secret
that it was started with, so the operator is told how to replace it as the next step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import msgspec

from kvbaton.cli import key_tokens
from kvbaton.cli.arguments import seconds
from kvbaton.control import key_room, keyring
from kvbaton.control.key_room import KeyReport, report
from kvbaton.control.keyring import LOOK_S
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.legality import Role

ACTIONS = {
    "new": "a new key directory",
    "add": "more names in it",
    "show": "what it holds: names, fingerprints, ages, members that joined, problems",
    "list": "the same",
    "rotate": "a new key for each NAME, or with --tickets for tickets; the old ones stay good until --finish",
    "remove": "names that are no longer let in, also of members that joined",
    "token": f"token {'|'.join(key_tokens.ACTIONS)} DIR [ID…]: tokens by which members join by themselves",
}
SETTLE_S = 2 * LOOK_S + 1.0
"""How long a new ticket key only verifies, so that every process that sees the directory has loaded it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = "; ".join(f"{a}: {h}" for a, h in ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=tuple(ACTIONS), help=actions)
    parser.add_argument("directory", metavar="DIR", help="the key directory; keep DIR/secret private")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        default=[],
        help=f"workers, of new and add also NAME:ROLE ({', '.join(Role)}); new adds {' and '.join(keyring.ALWAYS)}",
    )
    group = parser.add_argument_group("rotate")
    group.add_argument("--tickets", action="store_true", help="rotate the key that signs tickets")
    group.add_argument("--prepare", action="store_true", help="with --tickets: add the new key, sign with the old one")
    group.add_argument("--finish", action="store_true", help="revoke the old keys")
    group.add_argument(
        "--settle-s",
        metavar="S",
        type=seconds,
        default=SETTLE_S,
        help="with --tickets: wait between adding the key and signing with it",
    )
    key_tokens.add_arguments(parser.add_argument_group("token"))
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, all else on stderr")


def run(args: argparse.Namespace) -> int:
    if args.action == "token":
        return key_tokens.run(args)
    key_tokens.check_unused(args)
    _check(args)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "new": _new, "add": _add, "show": _show, "list": _show, "rotate": _rotate, "remove": _remove,
    }  # fmt: skip
    return actions[args.action](args)


def _check(args: argparse.Namespace) -> None:
    """Conflicting options are refused before anything is changed."""
    rotates = args.action == "rotate"
    for flag in ("tickets", "prepare", "finish"):
        if getattr(args, flag) and not rotates:
            raise CommandError(f"argument --{flag}: only with rotate; see: kvbaton keys --help")
    if args.prepare and (args.finish or not args.tickets):
        raise CommandError("argument --prepare: only with rotate --tickets, and without --finish")
    shows = args.action in ("show", "list")
    if shows and args.names:
        raise CommandError(f"argument NAME: {args.action} takes none")
    if not shows and args.action != "new" and not (args.names or args.tickets):
        more = ", or --tickets" if rotates else ""
        raise CommandError(f"argument NAME: give at least one{more}; see: kvbaton keys --help")
    if len(set(args.names)) != len(args.names):
        raise CommandError("names: one is given twice; give each once")


def _new(args: argparse.Namespace) -> int:
    given = {name.partition(":")[0] for name in args.names}
    names = [*(name for name in keyring.ALWAYS if name not in given), *args.names]
    keyring.mint(args.directory, names)
    return _minted(names, args)


def _add(args: argparse.Namespace) -> int:
    for name in args.names:
        keyring.add(args.directory, name)
    return _minted(args.names, args)


def _minted(names: list[str], args: argparse.Namespace) -> int:
    did = [f"minted {', '.join(names)} in {args.directory}"]
    return _tell(
        args, names, did, ["copy public/ and tickets.json to every host, secret/NAME.json only to where NAME runs"]
    )


def _tell(args: argparse.Namespace, names: list[str], did: list[str], then: list[str]) -> int:
    """What was done, and the operator's next step: the same words as lines and as an object."""
    if args.json:
        told = {"action": args.action, "dir": args.directory, "names": names, "did": did, "next": then}
        print(msgspec.json.encode(told).decode())
    else:
        print("\n".join([*did, *(f"next: {each}" for each in then)]))
    return 0


def _remove(args: argparse.Namespace) -> int:
    came_by = {member.name: member.token for member in report(args.directory).joined}
    for name in args.names:
        key_room.remove(args.directory, name)
    came = sorted({came_by[name] for name in args.names if name in came_by})
    who = f"removed {', '.join(args.names)} from {args.directory}"
    rest = (
        "on every other host remove public/NAME.json and copy removed.json; tickets need a new key if a host is lost:"
    )
    then = [f"{rest} kvbaton keys rotate {args.directory} --tickets"]
    if came:
        again = f"kvbaton keys token revoke {args.directory} {' '.join(came)}"
        then.append(f"who holds the token can join again under another name, unless it is revoked: {again}")
    did = [f"{who}; running processes reject it within {LOOK_S:g} s", key_tokens.AFTERMATH]
    return _tell(args, args.names, did, then)


def _rotate(args: argparse.Namespace) -> int:
    did, then = _rotate_tickets(args) if args.tickets else ([], [])
    for name in args.names:
        if args.finish:
            was = key_room.finish(args.directory, name)
            did.append(f"{name}: {'only its new key is accepted' if was else 'was not being rotated'}")
        else:
            key_room.rotate(args.directory, name)
            did.append(f"{name}: has a new key; the old one is accepted until --finish")
    if args.names:
        again = f"kvbaton keys rotate {args.directory} {' '.join(args.names)} --finish"
        first = "copy public/ to every host, then secret/NAME.json to where NAME runs; restart NAME (kvbaton drain)"
        then.append("copy public/ to every host" if args.finish else f"{first}; then: {again}")
    return _tell(args, args.names, did, then)


def _rotate_tickets(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What was done, and the next step."""
    where = args.directory
    if args.finish:
        count = key_room.finish_tickets(where)
        gone = f"tickets: {count} old {'key is' if count == 1 else 'keys are'} gone"
        return [gone], ["copy tickets.json to every host"]
    key_room.prepare_tickets(where)
    if args.prepare:
        then = f"copy tickets.json to every host; then: kvbaton keys rotate {where} --tickets"
        return ["tickets: a new key verifies; the old one signs"], [then]
    # Counted from when it was prepared, by whichever command: one that was broken off is given again at once
    time.sleep(max(0.0, args.settle_s - key_room.tickets_age_s(where)))
    key_room.promote_tickets(where)
    after = f"in {key_room.TICKETS_LIVE_S:g} s: kvbaton keys rotate {where} --tickets --finish"
    signs = "tickets: the new key signs; the old ones verify until --finish"
    return [signs], [f"copy tickets.json to every host; {after}"]


def _show(args: argparse.Namespace) -> int:
    found = report(args.directory)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(_lines(found)))
    return 1 if found.problems else 0


def _lines(found: KeyReport) -> list[str]:
    width = max((len(identity.name) for identity in found.identities), default=4)
    lines = [f"{len(found.identities)} identities in {found.directory}"]
    for one in found.identities:
        notes = [f"{_age(one.age_s)} old", "secret here" if one.secret_here else "no secret here"]
        notes += [one.role] + (["may drain workers"] if one.may_drain else [])
        notes += [f"being rotated: {key} is accepted too" for key in one.also]
        lines.append(f"  {one.name:<{width}}  {one.fingerprint}  {', '.join(notes)}")
    if found.joined:
        lines.append(f"{len(found.joined)} joined")
    width = max((len(member.name) for member in found.joined), default=4)
    for member in found.joined:
        standing = "removed, its name is free in" if member.removed else "for another"
        told = f"{member.role}, token {member.token}, {standing} {_age(member.left_s)}"
        lines.append(f"  {member.name:<{width}}  {member.fingerprint}  {told}")
    lines += key_tokens.lines(found.tokens) if found.tokens else []
    lines.append(f"{len(found.ticket_keys)} ticket keys")
    lines += [f"  {key.fingerprint}  {_USES[key.use]}" for key in found.ticket_keys]
    lines += [f"problem: {problem}" for problem in found.problems]
    return lines


_USES = {
    "signs": "signs and verifies",
    "verifies": "verifies only: finish its rotation",
    "next": "verifies only: will sign later",
}


_age = key_tokens.span
