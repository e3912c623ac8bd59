"""Every number of the router that an operator may turn, as one frozen value. Durations in seconds."""

from __future__ import annotations

import enum
import math
import re

import msgspec

from kvbaton.api.http.client_quotas import BYTES_MAX
from kvbaton.api.params import Mode
from kvbaton.protocol.wire.ticket import TICKET_LIFE_S_MAX
from kvbaton.router.policy import POLICIES

_ORIGIN = re.compile(r"https?://[^/?#@\s*A-Z]+")


def is_origin(text: str) -> bool:
    """Whether a browser could send this as the origin of a page, in lower case."""
    return _ORIGIN.fullmatch(text) is not None


class Fallback(enum.StrEnum):
    """What becomes of a request for which no prefill worker is left."""

    LOCAL = "local"  # the decode worker computes the prompt itself
    STRICT = "strict"  # an explicit error


class OperatorPages(enum.StrEnum):
    """Who is shown pages for operators: records of requests, and what is drawn of them."""

    AUTO = "auto"  # whoever asks from this machine, by an address, or shows an operator's key
    OPEN = "open"  # whoever reaches the router
    OFF = "off"  # nobody


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent on, how long anything may take, and how much is let in."""

    mode: Mode = Mode.PULL  # where the client names none
    modes_allowed: tuple[Mode, ...] = tuple(Mode)  # what the header x-kvbaton-mode may ask for
    policy: str = "least-loaded"  # its name in `policy.POLICIES`
    same_host: bool = True  # a pair on one host goes before others
    fallback: Fallback = Fallback.LOCAL
    disagg_min_tokens: int = 0  # a prompt with fewer tokens to compute goes to D alone
    chars_per_token: float = 4.0  # how the length of a text is estimated
    prefix_pieces_max: int = 65_536  # beginnings of prompts that are remembered, of 256 bytes each
    deadline_s: float = 300.0  # of a whole request, its stream included
    first_byte_s: float = 120.0  # of one try: P's answer, and D's first event
    connect_s: float = 5.0
    body_s: float = 60.0  # of a client's body, from its first byte to its last
    prefill_retries: int = 2  # further tries after a P failed, each with another one
    decode_retries: int = 1  # further tries after a D failed before its first byte
    suspect_s: float = 2.0  # who failed a request is asked last for this long
    breaker_failures: int = 3  # in a row; then a worker is asked no more until a probe is answered
    probe_s: float = 2.0  # of a probe's answer
    probe_min_s: float = 0.5  # until the first probe of a broken worker; doubled each time
    probe_max_s: float = 15.0
    settle_s: float = 5.0  # P may finish this long after D's answer has ended
    drain_s: float = 30.0  # requests under way may take this long when the router is told to stop
    ticket_ttl_s: float = 120.0
    turn_s: float = 0.0  # how long decode workers keep a turn of a conversation for the next; 0: they are not asked to
    streams_continue: bool = True  # a stream outlives its D: another goes on with it
    first_token: bool = True  # a stream's first token comes from P, as soon as that has it; with `streams_continue`
    stall_s: float = 30.0  # a D that owes an event and tells nothing for this long is left
    moves_max: int = 8  # of one stream, from D to D
    moves_per_s: float = 64.0  # of all streams; more wait for their turn
    history_max: int = 131_072  # tokens of one stream that are remembered; a longer one goes on and cannot move
    histories_max: int = 16_777_216  # of all streams, four bytes each
    in_flight_max: int = 2048  # requests to engines; beyond it clients get 429
    body_bytes_max: int = 4 << 20
    answer_bytes_max: int = 16 << 20
    held_bytes_max: int = BYTES_MAX  # of all requests and answers together; beyond it clients get 503
    show_pair: bool = False  # name the pair in the header x-kvbaton-pair
    operator_pages: OperatorPages = OperatorPages.AUTO
    origins_allowed: tuple[str, ...] = ()  # of web pages that may ask, besides the router's own; "*" is any
    cors_methods: tuple[str, ...] = ()  # that such pages may use; none: those that a path has
    cors_headers: tuple[str, ...] = ()  # that such pages may send; none: any
    cors_credentials: bool = False  # such pages may send what the browser keeps for this origin
    passes_authorization: bool = False  # clients' keys go on to workers
    trace: bool = False  # spans of requests are exported: each leg is told of a span of its own
    trace_sample: float = 1.0  # of requests that come without a trace, the share that gets one; 0 is none

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if field == "trace_sample":
                if not 0 <= value <= 1:
                    raise ValueError(f"trace_sample: got {value!r}, expected 0 to 1")
            elif field == "turn_s":
                if not 0 <= value <= TICKET_LIFE_S_MAX:
                    raise ValueError(f"turn_s: got {value!r}, expected 0 (off) to {TICKET_LIFE_S_MAX:.0f} seconds")
            elif isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field}: got {value!r}, expected a number above 0")
            least = 0 if field.endswith(("retries", "_tokens", "pieces_max")) else 1
            if type(value) is int and value < least:
                raise ValueError(f"{field}: got {value!r}, expected {least} or more")
        if "*" in self.origins_allowed and self.cors_credentials:
            raise ValueError("cors_credentials: not with origin *: any page could use its visitors' credentials")
        for origin in self.origins_allowed:
            if origin != "*" and not is_origin(origin):
                raise ValueError(f"origins_allowed: got {origin[:80]!r}, expected as https://host or http://host:port")
        if self.policy not in POLICIES:
            raise ValueError(f"policy: got {self.policy[:80]!r}, expected one of {', '.join(POLICIES)}")
        if self.mode not in self.modes_allowed:
            raise ValueError(f"mode: {self.mode} is not among the modes allowed")
        if self.ticket_ttl_s > TICKET_LIFE_S_MAX:
            raise ValueError(f"ticket_ttl_s: got {self.ticket_ttl_s}, expected at most {TICKET_LIFE_S_MAX:.0f}")
        if self.probe_min_s > self.probe_max_s:
            raise ValueError(f"probe_min_s: {self.probe_min_s} is more than probe_max_s, {self.probe_max_s}")

    @property
    def wants_prefixes(self) -> bool:
        """Whether beginnings of prompts are worth remembering."""
        return POLICIES[self.policy].by_prefix or self.disagg_min_tokens > 0
