"""Messages between an engine and its ranks, on the bench (`rank_messages`, `rank_store_messages`).

Laws: what was said is what is understood, in every field, whatever the size of the parts. The table of a copy is its
spans, then its weave's column, then its shifts, as 64-bit numbers, the lowest byte first. What came torn, too large or
as nonsense is refused by its field, and never understood as something else. Details are cut to what may cross.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from kvbaton.protocol.capabilities import Capabilities
from kvbaton.protocol.effects import Copy, DeviceEvent, Direction, Loan
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, CopyRested
from kvbaton.protocol.geometry.spans import SPANS_MAX
from kvbaton.protocol.geometry.strided_spans import Area, Weave
from kvbaton.protocol.ids import JobId
from kvbaton.ranks import rank_messages as said
from kvbaton.ranks import rank_store_messages as shelf
from kvbaton.store.content_keys import HASH_BYTES
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton_proof.sim.rank_models.rank_bench import PEERS, Raised, outcome, same

ROW, SHIFT, WORD = 24, 16, 8
DETAIL = 512
KEY = "k" * 40
REFUSED = Raised("ValueError")


def bench_messages(rng: random.Random) -> None:
    for _ in range(4):
        _copy_crosses(rng)
    _sizes(rng)
    _loan_crosses(rng)
    _ends_cross(rng)
    _invitation(rng)
    _hashes(rng)
    _ids(rng)


def any_copy(rng: random.Random, job: int, rows: int = 6) -> Copy:
    weave = Weave(_numbers(rng, 3 * rng.randrange(1, 4)), _numbers(rng, 2 * rng.randrange(1, 4)))
    return Copy(
        JobId(job),
        rng.choice(PEERS),
        rng.choice((Direction.READ, Direction.WRITE)),
        rng.randrange(3),
        rng.randrange(3),
        _numbers(rng, 3 * rng.randrange(rows)),
        weave=weave if rng.random() < 0.4 else None,
    )


def _numbers(rng: random.Random, count: int) -> array[int]:
    return array("q", [rng.getrandbits(rng.choice((4, 40, 62))) for _ in range(count)])


def _packed(*parts: array[int]) -> bytes:
    return b"".join(struct.pack(f"<{len(part)}q", *part) for part in parts)


def _copy_crosses(rng: random.Random) -> None:
    copy = any_copy(rng, rng.randrange(1 << 40))
    column, shifts = (copy.weave.column, copy.weave.shifts) if copy.weave is not None else (array("q"), array("q"))
    table = _packed(copy.spans, column, shifts)
    size = rng.choice((ROW, ROW, 2 * ROW, said.PART_BYTES_MAX))
    same("bytes of a table", said.table_bytes(copy), len(table))
    commands = said.submit_commands("plane", copy, *(() if size == said.PART_BYTES_MAX else (size,)))
    heard = [said.decode_command(said.encode_command(command)) for command in commands]
    parts = [table[at : at + size] for at in range(0, len(table), size)] or [b""]
    sizes = WORD * len(copy.spans), WORD * len(column), WORD * len(shifts)
    place = copy.direction, copy.local_region, copy.remote_region
    expected = [
        *(said.TablePart("plane", copy.job, part) for part in parts[:-1]),
        said.Submit("plane", copy.job, copy.peer, *place, *sizes, parts[-1]),
    ]
    same("commands of a copy", heard, expected)
    submit = cast(said.Submit, expected[-1])
    before = table[: len(table) - len(submit.table)]
    same("a copy that has crossed", _facts(said.copy_of(submit, before)), _facts(copy))
    for torn in (before[:-WORD], before + bytes(WORD), before + b"1", before[: -len(before) // 2]):
        if torn != before:
            same("a torn table", outcome(partial(said.copy_of, submit, torn), ValueError), REFUSED)
    late = msgspec.structs.replace(copy, after=cast(DeviceEvent, object()))
    same("a copy that waits for an event", outcome(lambda: said.submit_commands("plane", late), ValueError), REFUSED)


def _facts(copy: Copy) -> tuple[object, ...]:
    weave = (copy.weave.column, copy.weave.shifts) if copy.weave is not None else None
    place = copy.direction, copy.local_region, copy.remote_region
    return copy.job, copy.peer, *place, copy.spans, copy.after, weave


def _sizes(rng: random.Random) -> None:
    """Which tables may cross: whole rows, a weave with both of its parts, and no more than the bounds."""
    most, column = SPANS_MAX * ROW, rng.choice((2, 4, 8))
    fits = (
        (0, 0, 0), (ROW, 0, 0), (0, ROW, SHIFT), (ROW, 2 * ROW, SHIFT), (most, 0, 0),
        (most - 3 * ROW, ROW, 3 * SHIFT), (0, column * ROW, SPANS_MAX // column * SHIFT),
    )  # fmt: skip
    for sizes in fits:
        same(f"a table of {sizes} bytes", outcome(partial(said._check_sizes, *sizes), ValueError), None)
    refused = (
        (ROW - 1, 0, 0), (ROW + 1, 0, 0), (1, 0, 0), (0, ROW + 1, SHIFT), (0, ROW, SHIFT - 8), (0, ROW, SHIFT + 1),
        (0, ROW, 0), (0, 0, SHIFT), (most + ROW, 0, 0), (most, ROW, SHIFT), (most - ROW, ROW, SHIFT),
        (0, column * ROW, (SPANS_MAX // column + 1) * SHIFT),
    )  # fmt: skip
    for sizes in refused:
        same(f"a table of {sizes} bytes", outcome(partial(said._check_sizes, *sizes), ValueError), REFUSED)
    sent = said.Submit("plane", JobId(1), PEERS[0], Direction.READ, 0, 0, WORD, 0, 0, bytes(WORD))
    same("a row cut short", outcome(lambda: said.copy_of(sent), ValueError), REFUSED)
    large = msgspec.structs.replace(any_copy(rng, 1), spans=array("q", [1]), weave=None)
    same("a row cut short", outcome(lambda: said.submit_commands("plane", large), ValueError), REFUSED)


def _loan_crosses(rng: random.Random) -> None:
    blocks = tuple(tuple(rng.randrange(-1, 1 << 30) for _ in range(rng.randrange(4))) for _ in range(rng.randrange(4)))
    loan = Loan(JobId(rng.randrange(1 << 40)), rng.choice(PEERS), rng.choice(list(Direction)), blocks, any_due(rng))
    commands = [said.decode_command(said.encode_command(each)) for each in said.lend_commands("plane", loan, 48)]
    before, lend = b"".join(each.table for each in commands[:-1]), commands[-1]  # type: ignore[union-attr]
    assert isinstance(lend, said.RankLend)
    same("a loan that has crossed", (lend.transport, said.loan_of(lend, before)), ("plane", loan))
    torn = msgspec.structs.replace(lend, blocks=(b"123",))
    same("a torn list of blocks", outcome(lambda: said.loan_of(torn, before), ValueError), REFUSED)
    same("more than was due", outcome(lambda: said.loan_of(lend, before + bytes(8)), ValueError), REFUSED)
    most = SPANS_MAX * ROW
    for due, fits in (
        ((16, 8), True), ((16 * SPANS_MAX, 8), True), ((8, 8), False), ((16, 4), False), ((most, 8), False),
        ((16, 8 * SPANS_MAX), True), ((16, 8 * SPANS_MAX + 8), False), ((32, 8 * SPANS_MAX), False),
    ):  # fmt: skip
        told = outcome(partial(said._check_due, [(0, *due)]), ValueError)
        same(f"an area of {due} bytes", told, None if fits else REFUSED)
    many = outcome(partial(said._check_due, [(0, 16, 8)] * (said.TABLES_MAX + 1)), ValueError)
    same("more areas than there may be", many, REFUSED)


def any_due(rng: random.Random) -> tuple[Area, ...]:
    """What a writer has to write, of some regions."""
    numbers = [array("q", [rng.randrange(1 << 40) for _ in range(2 * rng.randrange(4))]) for _ in range(4)]
    return tuple(Area(rng.randrange(3), numbers[i], numbers[i + 1]) for i in range(0, rng.choice((0, 2, 4)), 2))


def _ends_cross(rng: random.Random) -> None:
    detail = "d" * rng.choice((0, 3, DETAIL, DETAIL + 1))
    reason = rng.choice((None, Reason.CANCELLED, Reason.BAD_SPAN))
    ended = CopyEnded(JobId(rng.randrange(99)), reason, rng.random() < 0.5, detail, rng.choice((None, 0, 7)))
    news = [
        said.RankEnded.of("plane", ended),
        said.Rested.of("plane", CopyRested(ended.job)),
        shelf.ShelfEnded.of(OrderEnded(OrderId(7), 3, reason, detail)),
    ]
    expected = [
        said.RankEnded("plane", ended.job, reason, ended.at_rest, detail[:DETAIL], ended.unwritten),
        said.Rested("plane", ended.job),
        shelf.ShelfEnded(7, 3, reason, detail[:DETAIL]),
    ]
    heard = said.decode_news(said.encode_news(news))  # type: ignore[arg-type]
    same("news that has crossed", heard, expected)
    short = msgspec.structs.replace(ended, detail=detail[:DETAIL])
    same("the end of a copy", expected[0].event, short)  # type: ignore[attr-defined]
    same("the end of an order", expected[2].end, OrderEnded(OrderId(7), 3, reason, detail[:DETAIL]))  # type: ignore[attr-defined]
    many = said.encode_news([said.Rested("plane", JobId(1))] * (said.NEWS_BATCH_MAX + 1))
    same("a batch beyond the bound", outcome(lambda: said.decode_news(many), msgspec.MsgspecError), _UNREADABLE)
    nonsense = outcome(lambda: said.decode_command(b"\x91\x01"), msgspec.MsgspecError)
    same("a command that is none", nonsense, _UNREADABLE)


_UNREADABLE = Raised("MsgspecError")


def _invitation(rng: random.Random) -> None:
    able = Capabilities("shm", one_sided=True, can_write=False, can_fence=False, cancels=True, same_host=True)
    names = rng.sample(("b", "a", "c"), rng.randrange(1, 4))
    keys = KEY[1:] + "1", KEY[1:] + "2", KEY[1:] + "3"
    planes, has_shelf = dict.fromkeys(names, able), rng.random() < 0.5
    made = said.RankInvitation(rng.randrange(4), "tcp://127.0.0.1:5000", *keys, planes, has_shelf)
    same("an invitation", said.RankInvitation.decode(made.encode()), made)
    same("an invitation, shown", made.__rich_repr__()[0], ("rank", made.rank))
    shown = f"{made} {made!r} {made.__rich_repr__()}"
    same("keys that are shown", [key for key in keys if key in shown], [])
    same("the name of a rank", said.rank_name(made.rank), f"rank-{made.rank}")
    for field, wrong in (
        ("endpoint", "tcp://nowhere:5000"),
        ("endpoint", "tcp://127.0.0.1:0"),
        ("rank_public", " " * 40),
        ("engine_public", " " * 40),
        ("engine_secret", " " * 40),
        ("engine_secret", "short"),
        ("rank", -1),
        ("capabilities", {}),
    ):
        bad = msgspec.structs.replace(made, **{field: wrong}).encode()
        same(f"an invitation with another {field}", _decoded(bad), REFUSED)
    same("what is no invitation", _decoded(rng.choice((b"", b"\xc1", b"\x81\xa1\xff\x01"))), REFUSED)


def _decoded(data: bytes) -> object:
    """Who refuses does not show what was refused."""
    try:
        return said.RankInvitation.decode(data)
    except ValueError as error:
        same("a secret in an error", [part for part in str(error).split() if len(part) == len(KEY)], [])
        return Raised("ValueError" if type(error) is ValueError else type(error).__name__)


def _hashes(rng: random.Random) -> None:
    hashes = [rng.randbytes(HASH_BYTES) for _ in range(rng.choice((1, 2, 5)))]
    packed = b"".join(hashes)
    same("packed hashes", shelf.pack_hashes(hashes), packed)
    same("hashes that have crossed", shelf.hashes_of(packed), tuple(hashes))
    _refused("hashes", "no hashes", lambda: shelf.pack_hashes([]))
    _refused("hashes", "too many hashes", lambda: shelf.pack_hashes([hashes[0]] * (shelf.KEYS_MAX + 1)))
    same("as many hashes as may be", len(shelf.pack_hashes([hashes[0]] * shelf.KEYS_MAX)), shelf.KEYS_MAX * HASH_BYTES)
    _refused("hashes", "a hash of another length", lambda: shelf.pack_hashes([*hashes, hashes[0] + b"1"]))
    _refused("hashes", "a hash of another length", lambda: shelf.pack_hashes([hashes[0][1:], *hashes]))
    _refused("hashes", "torn hashes", lambda: shelf.hashes_of(packed[: -rng.randrange(1, HASH_BYTES)]))


def _ids(rng: random.Random) -> None:
    ids = [rng.getrandbits(rng.choice((3, 40, 62))) for _ in range(rng.randrange(5))]
    packed = struct.pack(f"<{len(ids)}q", *ids)
    same("packed ids", shelf.pack_ids(ids), packed)
    same("ids that have crossed", shelf.ids_of(packed), tuple(ids))
    _refused("ids", "an id of more than 64 bits", lambda: shelf.pack_ids([1 << 63]))
    _refused("ids", "an id that is none", lambda: shelf.pack_ids(cast(Any, ["1"])))
    _refused("ids", "torn ids", lambda: shelf.ids_of(packed + bytes(rng.randrange(1, WORD))))


def _refused(field: str, what: str, act: Callable[[], object]) -> None:
    try:
        act()
    except ValueError as error:
        same(f"{what}: the field that an error names", str(error).partition(":")[0], field)
    else:
        same(what, "taken", "refused")
