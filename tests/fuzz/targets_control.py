"""What reaches the control planes and is read from files: announcements, registrations, addresses, keys, plans."""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from guided import Target
from laws import DECODERS, heard, understood
from mutators import Shape

from kvbaton.control import keyring
from kvbaton.control.addressing import ControlError, check_authority, check_bind, check_endpoint
from kvbaton.control.plain.announcer import MoriioRegistration, p2p_nccl_registration, registration
from kvbaton.control.registry import registry_messages as m
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.ranks.store_trust import store_place
from kvbaton_proof.chaos import chaos_plan as chaos

MORIIO = "host:10.0.0.1,handshake:6301,notify:61005"
JSON = msgspec.json.encode


def plain_seeds() -> list[bytes]:
    return [
        registration("P", "10.0.0.1:8100", MORIIO, transfer_mode="READ").payload,
        registration("D", "[2001:db8::1]:8100", MORIIO, transfer_mode="WRITE", tp_size=8, dp_size=2).payload,
        p2p_nccl_registration("P", "10.0.0.1:8100", "10.0.0.1:21001").payload,
    ]


def announcement(data: bytes) -> None:
    heard(data)


def announced(data: bytes) -> None:
    """What our own worker would announce is refused by name, or can be heard by our own router."""
    try:
        said = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(said, dict):
        return
    texts = [said.get(name) for name in ("role", "http", "zmq", "mode")]
    sizes = [said.get(name, 1) for name in ("tp", "dp")]
    if not all(isinstance(text, str) for text in texts) or not all(type(size) is int for size in sizes):
        return
    role, http, zmq, mode = typing.cast(list[typing.Any], texts)
    found: list[MoriioRegistration] = []
    with contextlib.suppress(ControlError):
        found.append(registration(role, http, zmq, transfer_mode=mode, tp_size=sizes[0], dp_size=sizes[1]))
    with contextlib.suppress(ControlError):
        found.append(p2p_nccl_registration(role, http, zmq))
    for each in found:
        assert len(each.payload) < 4096
        heard(each.payload)


def announced_seeds() -> list[bytes]:
    said = {"role": "P", "http": "10.0.0.1:8100", "zmq": MORIIO, "mode": "READ", "tp": 2, "dp": 1}
    return [JSON(said), JSON({**said, "role": "D", "zmq": "10.0.0.1:21001"}), JSON({**said, "http": "[::1]:80"})]


# --- the registry


def plainest_messages() -> Iterator[tuple[Callable[[bytes], msgspec.Struct], msgspec.Struct]]:
    """One message of each kind, made of the plainest values, with the decoder that understands it."""
    for _, decoder in sorted(DECODERS.items()):
        result = typing.get_type_hints(decoder)["return"]
        yield from ((decoder, _plainest(kind)) for kind in typing.get_args(result) or (result,))


def registry_seeds() -> list[bytes]:
    return [m.encode(message) for _, message in plainest_messages()]  # type: ignore[arg-type]


_PLAIN: dict[str, object] = {
    "worker": WorkerId("d0"), "incarnation": Incarnation(5), "role": "decode", "dp_rank": 0, "host": "h",
    "endpoint": "tcp://10.0.0.1:5000", "control_endpoint": "tcp://10.0.0.1:5000",
    "http_address": "10.0.0.1:8100", "http": "10.0.0.1:8100",
    "public": "a" * 40, "key": "a" * 40, "public_key": "a" * 40,
}  # fmt: skip


def _plainest(kind: typing.Any, name: str = "") -> typing.Any:
    least = 1
    while typing.get_origin(kind) is typing.Annotated:
        kind, bounds = typing.get_args(kind)[:2]
        least = max(least, getattr(bounds, "min_length", None) or 0)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, PeerId):
        return PeerId(WorkerId("d0"), Incarnation(5))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{field: _plainest(hints[field], field) for field in kind.__struct_fields__})
    if name in _PLAIN:
        return _PLAIN[name]
    if origin is tuple:
        return (_plainest(inner[0]),)
    if origin is typing.Literal:
        return inner[0]
    kind = getattr(kind, "__supertype__", kind)
    if type(None) in typing.get_args(kind):
        return None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return {int: 1, str: "x", bool: True, bytes: b"x" * least, float: 1.0}[kind]


# --- what operators write


def addresses(data: bytes) -> None:
    """`ValueError`, or the text as it was, and then it is short and holds no blanks."""
    text = data.decode("utf-8", "surrogateescape")
    for check in (check_endpoint, check_bind, check_authority, lambda text: check_endpoint(text, names=True)):
        with contextlib.suppress(ValueError):
            assert check(text) == text and len(text) < 400 and not any(map(str.isspace, text)), text
    with contextlib.suppress(ValueError):
        store_place(text)


ADDRESSES = ["tcp://10.0.0.1:5000", "tcp://[::1]:1", "tcp://*:0", "10.0.0.1:80", "tcp://name.local:99",
             "mooncake://h:1?lend=256MiB&host=10.0.0.1&protocol=tcp&devices=a&metadata=m",
             "tcp://0.0.0.0:0"]  # fmt: skip


def planned(data: bytes) -> None:
    """`ValueError`, or a plan that is the same when it is written and read again."""
    try:
        found = chaos.from_json(data)
    except ValueError:
        return
    assert chaos.from_json(chaos.to_json(found)) == found
    assert all(step.title() for step in found.steps)


def plan_seeds() -> list[bytes]:
    steps = (
        chaos.Step(1.0, "kill", "d0", chaos.Moment.MID_COPY),
        chaos.Step(2.0, "partition", "p0-d1", seconds=3.0),
        chaos.Step(2.5, "poison", detail="huge"),
    )
    plan = chaos.Plan(name="random", seed=7, engine="embedded", steps=steps)
    return [chaos.to_json(plan), chaos.to_json(msgspec.structs.replace(plan, steps=()))]


# --- key files


class KeyFiles:
    """A key directory of which one file after the other is replaced by the input."""

    def __init__(self) -> None:
        self._base: Path | None = None
        self._good: dict[str, bytes] = {}
        self._owner = 0
        self._secret = ""

    @property
    def base(self) -> Path:
        if self._base is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._base = Path(tempfile.mkdtemp(prefix="kvbaton-fuzz-")) / "keys"
            keyring.mint(self._base, ["d0", "p0"])
            names = ("public/d0.json", "secret/d0.json", "tickets.json")
            self._good = {name: (self._base / name).read_bytes() for name in names}
            self._secret = keyring.load(self._base, "d0").secret
        return self._base

    def close(self) -> None:
        """Remove it all; the next input makes another."""
        if self._base is not None and self._owner == os.getpid():
            shutil.rmtree(self._base.parent, ignore_errors=True)
            self._base = None

    def seeds(self) -> list[bytes]:
        secret = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"
        public = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
        return [
            JSON({"name": "d0", "public": public}),
            JSON({"name": "d0", "secret": secret}),
            JSON({"keys": ["ab" * 32, "cd" * 32]}),
            b"{}",
        ]

    def run(self, data: bytes) -> None:
        """`ControlError` that shows no secret, or a keyring."""
        base = self.base
        for name, good in self._good.items():
            (base / name).write_bytes(data)
            try:
                ring = keyring.load(base, "d0")
            except ControlError as error:
                assert len(str(error)) < 2 * keyring.FILE_BYTES_MAX and self._secret not in str(error)
            else:
                assert ring.name == "d0" and ring.peers and all(len(key) == 32 for key in ring.ticket_keys)
                assert ring.secret not in repr(ring)
            finally:
                (base / name).write_bytes(good)


KEY_FILES = KeyFiles()


TARGETS = (
    Target("plain", announcement, plain_seeds, Shape.MSGPACK, 3000),
    Target("announced", announced, announced_seeds, Shape.JSON, 2000),
    Target("registry", understood, registry_seeds, Shape.MSGPACK, 3000),
    Target("addresses", addresses, lambda: [text.encode() for text in ADDRESSES], Shape.TEXT, 2000),
    Target("chaos_plan", planned, plan_seeds, Shape.JSON, 2000),
    Target("key_files", KEY_FILES.run, KEY_FILES.seeds, Shape.JSON, 200),
)
