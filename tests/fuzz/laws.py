"""What holds for the parsers of ids, announcements and registrations, whatever they are given."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbaton.api.request_ids import (
    REQUEST_ID_CHARS_MAX,
    RequestIdError,
    build,
    parse,
    parse_address,
    transfer_hex,
)
from kvbaton.control.plain import Announcement, Fleet, PlainFault
from kvbaton.control.plain.announcements import RANKS_MAX, decode
from kvbaton.control.registry import registry_messages as m
from kvbaton.protocol.ids import is_worker_id
from kvbaton.router.workers.directories import worker_name

P_MARK, D_MARK = "___prefill_addr_", "___decode_addr_"
HEX = "0123456789abcdef"

DECODERS: dict[str, Callable[[bytes], msgspec.Struct]] = {
    name: decoder for name, decoder in vars(m).items() if name.startswith("decode_")
}


def bounded(error: RequestIdError) -> None:
    assert str(error).startswith(f"{error.field}: ") and len(str(error)) < 1200 and len(error.field) < 32


def looked_at(text: str) -> None:
    """Every parser: a refusal, nothing, or a value within bounds that is read the same when it is written again."""
    try:
        found = parse(text)
    except RequestIdError as error:
        bounded(error)
    else:
        if found is None:
            assert P_MARK not in text and D_MARK not in text
        else:
            assert len(text) <= REQUEST_ID_CHARS_MAX
            assert max(found.prompt_index, found.input_index, found.sample_index) < 10_000_000
            bare = msgspec.structs.replace(found, prompt_index=0, input_index=0, sample_index=0)
            assert parse(build(found.prefill, found.decode, found.unique)) == bare
    try:
        address = parse_address(text)
    except RequestIdError as error:
        bounded(error)
    else:
        assert parse_address(str(address)) == address and len(str(address)) < 300
        assert all(1 <= port <= 65_535 for port in msgspec.structs.astuple(address)[1:])
    digits = transfer_hex(text)
    assert digits is None or (len(digits) == 32 and set(digits) <= set(HEX))


def told(said: Announcement) -> dict[str, object]:
    """The map that a worker would send."""
    fields: dict[str, object] = {
        "type": said.role,
        "http_address": said.http_address,
        "zmq_address": said.zmq_address,
        "dp_size": said.dp_size,
        "tp_size": said.tp_size,
    }
    if said.fleet is not Fleet.P2P_NCCL:
        fields["transfer_mode"] = said.fleet.transfer_mode
    return fields


def heard(payload: bytes) -> Announcement | None:
    """What is understood: nothing, with a short fault that names a field, or something in one form that can be used."""
    try:
        found = decode(payload)
    except PlainFault as fault:
        assert str(fault).startswith(f"{fault.field}: ") and len(str(fault)) < 400
        return None
    assert decode(msgspec.msgpack.encode(told(found))) == found
    assert str(parse_address(found.zmq_address)) == found.zmq_address
    assert str(parse_address(found.http_address)) == found.http_address
    assert 1 <= found.dp_size <= RANKS_MAX and 1 <= found.tp_size <= RANKS_MAX
    assert len(found.http_address) < 300 and len(found.zmq_address) < 300
    assert is_worker_id(worker_name(found))
    return found


def understood(frame: bytes) -> None:
    """Whatever each decoder makes of it can be said and understood again; or a fault with a text."""
    for decoder in DECODERS.values():
        try:
            found = decoder(frame)
        except m.RegistryFault as fault:
            assert str(fault)
        else:
            assert decoder(m.encode(found)) == found  # type: ignore[arg-type]
