"""Request ids that name two workers, as vLLM's MoRI-IO and P2pNccl routers build them, and vLLM decorates them.

    ___prefill_addr_{P}___decode_addr_{D}_{32 lowercase hex}

Law: an id is untrusted. It is read from the right, anchored at both ends and bounded; `parse` raises `RequestIdError`
and nothing else. What it yields is a name to look up among registered workers, never an address to dial.

Each marker stands once, and so does the hex: an id with two of either could be read in two ways, and is refused.
What surrounds them is understood by shape: `{k}_` (sample of n > 1), the endpoint's word (`cmpl-`, `chatcmpl-`,
`generate-tokens-`, `resp_`, or one of a later vLLM), and behind the hex `-{prompt}`, `_{input}` and `-{8 hex}`, each
optional, in this order. Eight characters are always vLLM's random tail, so a prompt index has at most seven digits.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from typing import TypeAlias

import msgspec

REQUEST_ID_CHARS_MAX = 1024
HOST_CHARS_MAX = 253

_P_MARK = "___prefill_addr_"
_D_MARK = "___decode_addr_"
_INDEX = r"0|[1-9][0-9]{0,6}"
_BEFORE = re.compile(rf"(?:(?P<sample>{_INDEX})_)?(?:[a-z][a-z-]{{0,30}}[-_])?")
_HEX = re.compile(r"[0-9a-f]{32}")
_BEHIND = re.compile(
    rf"(?P<address>.*)_(?P<unique>[0-9a-f]{{32}})(?:-(?P<prompt>{_INDEX}))?(?:_(?P<input>{_INDEX}))?(?:-[0-9a-f]{{8}})?",
    re.DOTALL,
)
_MORIIO = re.compile(r"host:(?P<host>[^,]*),handshake:(?P<handshake>[^,]*),notify:(?P<notify>[^,]*)", re.DOTALL)
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{HOST_CHARS_MAX - 1}}}")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_PLAIN_ID = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARS_MAX}}}")
_TRANSFER = re.compile(r"tx-?(?:([0-9a-f]{32})|([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}))")


def checked_request_id(given: str) -> str:
    """The caller's id for the request where it is printable and short, else a new one."""
    return given if given and _PLAIN_ID.fullmatch(given) else secrets.token_hex(16)


def clients_request_id(given: str) -> str:
    """The same at a router, whose clients name no workers."""
    return checked_request_id("" if given and holds_addresses(given) else given)


def holds_addresses(name: str) -> bool:
    """Whether a worker might read addresses from this id; those of D alone keep the client's."""
    try:
        return parse(name) is not None
    except RequestIdError:
        return True


class RequestIdError(ValueError):
    """An id that holds addresses, but not well formed ones. `field` says which part; the router must act."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class MoriioAddress(msgspec.Struct, frozen=True, tag="moriio"):
    """Where a MoRI-IO worker listens. IPv6 stands bare in its text form: MoRI-IO takes brackets for a host name."""

    host: str
    handshake: int
    notify: int

    def __str__(self) -> str:
        return f"host:{self.host},handshake:{self.handshake},notify:{self.notify}"


class HostPort(msgspec.Struct, frozen=True, tag="host_port"):
    """P2pNccl's address, or the HTTP address that vllm-router writes when it was given URLs. IPv6 in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


PeerAddress: TypeAlias = MoriioAddress | HostPort
"""Hosts are canonical: names in lower case, IPv6 compressed and without brackets, so that equal means same."""


class Addresses(msgspec.Struct, frozen=True):
    """What an id says. P and D of one prompt agree on everything here; vLLM's random tail differs, and is not kept."""

    prefill: PeerAddress
    decode: PeerAddress
    unique: str  # 32 lowercase hex, drawn by the router
    prompt_index: int = 0  # of a completion with several prompts
    input_index: int = 0  # of a chat that became several engine requests
    sample_index: int = 0  # of n > 1


def build(prefill: PeerAddress, decode: PeerAddress, unique: str) -> str:
    """The id as a router sends it in `X-Request-Id`; `RequestIdError` names what cannot be expressed."""
    if _HEX.fullmatch(unique) is None:
        raise RequestIdError("unique", f"{_shown(unique)} is not 32 lowercase hex digits")
    parse_address(str(prefill), "prefill")
    parse_address(str(decode), "decode")
    return f"{_P_MARK}{prefill}{_D_MARK}{decode}_{unique}"


def parse(request_id: str) -> Addresses | None:
    """What an id holds, decorated by vLLM or not; None where it holds no addresses, `RequestIdError` for bad ones."""
    counts = request_id.count(_P_MARK), request_id.count(_D_MARK)
    if counts == (0, 0):
        return None
    if len(request_id) > REQUEST_ID_CHARS_MAX:
        raise RequestIdError("request_id", f"{len(request_id)} characters, at most {REQUEST_ID_CHARS_MAX}")
    if counts != (1, 1):
        raise RequestIdError("request_id", f"{counts[0]} prefill and {counts[1]} decode markers, expected one of each")
    rest, _, right = request_id.rpartition(_D_MARK)
    left, p_mark, middle = rest.rpartition(_P_MARK)
    if not p_mark:
        raise RequestIdError("request_id", "the decode address stands before the prefill address")
    behind = _BEHIND.fullmatch(right)
    if behind is None:
        raise RequestIdError("unique", f"{_shown(right[-64:])} does not end in _ and 32 lowercase hex digits")
    before = _BEFORE.fullmatch(left)
    if before is None:
        raise RequestIdError("prefix", f"{_shown(left)} is nothing that vLLM puts before a request id")
    return Addresses(
        parse_address(middle, "prefill"),
        parse_address(behind["address"], "decode"),
        behind["unique"],
        int(behind["prompt"] or 0),
        int(behind["input"] or 0),
        int(before["sample"] or 0),
    )


def parse_address(text: str, field: str = "zmq_address") -> PeerAddress:
    """`host:H,handshake:N,notify:N`, `H:N` or `[v6]:N`; `RequestIdError` names the part of `field` that is wrong."""
    match = _MORIIO.fullmatch(text)
    if match is not None:
        host = _host(match["host"], f"{field}.host")
        ports = _port(match["handshake"], f"{field}.handshake"), _port(match["notify"], f"{field}.notify")
        return MoriioAddress(host, *ports)
    host, colon, port = text.rpartition(":")
    if not colon or "," in text:
        raise RequestIdError(field, f"{_shown(text)} is neither host:H,handshake:N,notify:N nor H:N")
    if ":" in host and not host.startswith("["):
        raise RequestIdError(f"{field}.host", f"{_shown(host)}: an IPv6 address before a port stands in brackets")
    return HostPort(_host(host, f"{field}.host"), _port(port, f"{field}.port"))


def transfer_hex(transfer_id: str) -> str | None:
    """The 32 hex digits of `tx-<32 hex>` (vllm-router), `tx-<uuid>` (vLLM's toy proxy) or `tx<uuid>` (llm-d's sidecar).

    None for any other text.
    """
    match = _TRANSFER.fullmatch(transfer_id)
    return None if match is None else (match[1] or match[2].replace("-", ""))


def _host(text: str, field: str) -> str:
    """The canonical form. A name that a resolver would read as a number (`127.1`, `0x7f.1`) is refused."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare:
        return _ipv6(bare, field)
    if bare is not text or _NAME.fullmatch(bare) is None or "___" in bare:
        raise RequestIdError(field, f"{_shown(text)} is not an address or a host name")
    if _NUMERIC_LABEL.fullmatch(bare.rstrip(".").rpartition(".")[2]) is None:
        return bare.lower()
    try:
        return str(ipaddress.IPv4Address(bare))
    except ValueError:
        raise RequestIdError(field, f"{_shown(text)} is not an IPv4 address of four decimal parts") from None


def _ipv6(text: str, field: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        address = None
    if address is None or address.scope_id is not None:  # a zone means something on one host only
        raise RequestIdError(field, f"{_shown(text)} is not an IPv6 address")
    return str(address)


def _port(text: str, field: str) -> int:
    if _PORT.fullmatch(text) is None or int(text) > 65535:
        raise RequestIdError(field, f"{_shown(text)} is not a port, 1..65535")
    return int(text)


def _shown(text: str) -> str:
    return ascii(text[:80])
