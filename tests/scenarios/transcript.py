"""Messages and effects as lines for people: what two workers said to each other and did, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pair import Frame, Pair
from party import Party

from kvbaton.protocol import effects as fx
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.wire.codec import unpack_blocks
from kvbaton.protocol.wire.messages import Message

HIDDEN = {"card", "ticket", "digest", "endpoints"}
"""Opaque, long, or the same in every line."""


def lines(pair: Pair, begin: int) -> list[str]:
    """The log from entry `begin` on; a line of its own for each new instant."""
    found, last = [], None
    for entry, at in zip(pair.log[begin:], pair.times[begin:], strict=True):
        if at != last and (last is not None or at > 0):
            found.append(f"at {at:g} s")
        last = at
        found.append(frame_line(entry) if isinstance(entry, Frame) else effect_line(*entry))
    return found


def frame_line(frame: Frame) -> str:
    fate = "" if frame.fate == "sent" else f"  ({frame.fate})"
    return f"  {frame.source} -> {frame.target}  {message_text(frame.message)}{fate}"


def effect_line(party: Party, effect: fx.Effect | str) -> str:
    return f"  {party.name}       {effect if isinstance(effect, str) else effect_text(effect)}"


def message_text(message: Message) -> str:
    parts = [type(message).__name__]
    for name in message.__struct_fields__:
        if name not in HIDDEN:
            parts.append(_field(name, getattr(message, name)))
    return " ".join(filter(None, parts))


def effect_text(effect: fx.Effect) -> str:
    return _EFFECTS[type(effect)](effect)


def _field(name: str, value: Any) -> str:
    if name in ("final", "deferred"):
        return name if value else ""
    if name == "blocks":
        return f"blocks={_groups(tuple(unpack_blocks(ids) for ids in value))}"
    if name == "handoff":
        return f"handoff={int(value.partition('.')[0], 16)}"
    if name == "progress":
        return f"ready={_progress(value)}"
    if name in ("start", "have", "good"):
        return f"{name}={','.join(map(str, value)) or '-'}"
    if name == "ttl_s":
        return f"ttl={value:g}s"
    if name == "detail":
        return f'"{value}"' if value else ""
    if name == "incarnation":
        return f"incarnation={value:x}"
    return "" if value is None or value == "" else f"{name}={value}"


def _groups(groups: tuple[tuple[int, ...], ...]) -> str:
    return "[" + " | ".join(" ".join(map(str, ids)) for ids in groups) + "]"


def _progress(progress: Progress) -> str:
    """`3`: three blocks; `0+2x1`: of two more blocks, one layer."""
    texts = []
    for group in progress:
        more = group.blocks_ahead - group.blocks_done if group.layers_ahead else 0
        texts.append(f"{group.blocks_done}+{more}x{group.layers_ahead}" if more else str(group.blocks_done))
    return ",".join(texts)


def _copy(effect: fx.StartCopy) -> str:
    copy = effect.copy
    verb, way = ("reads", "from") if copy.direction is fx.Direction.READ else ("writes", "to")
    return f"rank {effect.rank} {verb} {sum(copy.spans[2::3])} bytes {way} {copy.peer.worker} (copy {copy.job})"


def _end(end: fx.End) -> str:
    if end.delivered:
        return "is delivered"
    good = f", {end.good_tokens} tokens are good" if end.good_tokens else ""
    return f"fails as {end.reason}{good}: {end.detail}" if end.detail else f"fails as {end.reason}{good}"


_EFFECTS: dict[type, Callable[[Any], str]] = {
    fx.StartCopy: _copy,
    fx.Lend: lambda effect: (
        f"lends {effect.loan.peer.worker} {_groups(effect.loan.blocks)} to {effect.loan.direction.value}, "
        f"as {effect.loan.job}"
    ),
    fx.CancelCopy: lambda effect: f"copy {effect.job} is to stop",
    fx.StartFence: lambda effect: f"{effect.peer.worker} is to be shut out of rank {effect.rank}",
    fx.Connect: lambda effect: f"connects to {effect.peer.worker} by {effect.transport}",
    fx.Disconnect: lambda effect: f"disconnects from {effect.peer.worker}",
    fx.Unpin: lambda effect: f"unpins lease {effect.lease}",
    fx.UnpinPut: lambda effect: f"unpins put {effect.put}",
    fx.MatchFound: lambda effect: f"{effect.request} may look for blocks",
    fx.MatchFailed: lambda effect: f"{effect.request} {_end(effect.end)}",
    fx.Report: lambda effect: f"{effect.request} {_end(effect.end)}",
    fx.DropHold: lambda effect: f"{effect.request} lets its blocks go",
    fx.StorePut: lambda effect: f"put {effect.put} stores {_groups(effect.blocks)}",
    fx.GivenUp: lambda effect: f"does without {effect.transport} to {effect.worker}: {effect.detail}",
    fx.ForgetCache: lambda effect: f"the engine is to forget its cache: {', '.join(effect.origins)} is gone",
    fx.CancelPut: lambda effect: f"put {effect.put} is to stop",
}
