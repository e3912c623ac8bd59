"""Who may ask the router over HTTP: API keys of clients and operators, and web pages of other origins (CORS).

Laws: with clients' keys, nothing is answered without one but what monitoring reads, preflights, and pages for
operators, whose keys open those and no prompt. A key that is in both lists is a client's. A key is compared by its
digest, with all others, in the same time whatever it is; it is in no log, no error and no figure, and does not go on to
workers unless the operator says so. A page of another origin reads an answer only if its origin is named.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import Answer, Request
from kvbaton.api.http.tls_server import stamp

log = logging.getLogger(__name__)

KEYS_MAX = 1024
KEY_CHARS_MIN = 8
KEYS_FILE_BYTES_MAX = 1 << 20
OPEN_PATHS = frozenset(["/health", "/ping", "/metrics", "/version", "/load"])
"""What load balancers and monitoring read: without a key."""
ANY = "*"
PREFLIGHT_S = 600
AUTHORIZATION = frozenset([b"authorization", b"x-api-key"])
_KEY = re.compile(rf"[\x21-\x7e]{{{KEY_CHARS_MIN},512}}")
_METHOD = re.compile(r"[A-Z]{1,20}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,80}")


class KeyFileError(ValueError):
    """The operator must mend a key, or its file."""


def read_keys(text: str, where: str, at_least: int = 1) -> tuple[str, ...]:
    """Keys, one a line or between blanks; a line that begins with # is none. No error shows one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    keys = tuple(key for line in lines for key in line.split())
    if not at_least <= len(keys) <= KEYS_MAX:
        raise KeyFileError(f"{where}: {len(keys)} keys, expected {at_least} to {KEYS_MAX}, one a line")
    for number, key in enumerate(keys, 1):
        if _KEY.fullmatch(key) is None:
            raise KeyFileError(f"{where}: key {number} is not {KEY_CHARS_MIN} to 512 printable ASCII characters")
    return keys


def read_key_file(path: str, at_least: int = 1) -> tuple[str, ...]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(KEYS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > KEYS_FILE_BYTES_MAX:
        raise KeyFileError(f"{path}: larger than {KEYS_FILE_BYTES_MAX} bytes")
    return read_keys(data.decode("utf-8", "replace"), path, at_least)


class ApiKeys:
    """Keys of one kind."""

    def __init__(self, keys: Iterable[str] = (), file: str = "", *, may_be_empty: bool = False) -> None:
        """`KeyFileError` names what is wrong. The file is read again when it changes.

        `may_be_empty`: no key opens nothing. Where no key means that everybody may ask, an empty file is a mistake.
        """
        self._at_least = 0 if may_be_empty else 1
        self._file = file
        self._given = tuple(keys)
        self._stamp = stamp(file) if file else None
        self._digests = self._digested()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def _digested(self) -> tuple[bytes, ...]:
        keys = (*self._given, *(read_key_file(self._file, self._at_least) if self._file else ()))
        return tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def refresh(self) -> bool:
        """Read the file again if it has changed; True if it had. `KeyFileError`: the keys of before stay good."""
        if not self._file or stamp(self._file) == self._stamp:
            return False
        self._stamp = stamp(self._file)
        self._digests = self._digested()
        return True

    def is_good(self, shown: bytes) -> bool:
        digest = hashlib.sha256(shown).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def shares(self, other: ApiKeys) -> bool:
        """Whether a key is in both."""
        return not set(self._digests).isdisjoint(other._digests)

    def check(self, request: Request) -> None:
        """`ApiError` (401) for who shows none, or a wrong one."""
        if not self.is_good(shown_key(request)):
            said = "a valid API key is needed: send Authorization: Bearer KEY (or x-api-key: KEY)"
            raise ApiError(401, said, type="authentication_error", code="invalid_api_key")


class FrontKeys:
    """All keys that may be shown. Without clients' keys nobody needs one; without operators' there is none to show."""

    def __init__(self, clients: ApiKeys, operators: ApiKeys) -> None:
        self.clients = clients
        self.operators = operators

    def is_operator(self, request: Request) -> bool:
        shown = shown_key(request)
        return self.operators.is_good(shown) and not self.clients.is_good(shown)

    def refresh(self) -> None:
        """Files that have changed are read again; a broken one changes nothing. A key in both is a client's."""
        for whose, keys in (("clients'", self.clients), ("operators'", self.operators)):
            try:
                if keys.refresh():
                    log.info("the file of %s API keys was read again", whose)
                    if self.clients.shares(self.operators):
                        log.warning("[front-files] a key is a client's and an operator's: it opens no operators' page")
            except KeyFileError as error:
                log.warning("[front-files] %s; the keys of before are good on", error)


def shown_key(request: Request) -> bytes:
    """As OpenAI's clients send it, or as Anthropic's do; b"" for none, or for several."""
    found = [(name, value.strip()) for name, value in request.headers if name in AUTHORIZATION]
    given = set()
    for name, value in found:
        scheme, _, rest = value.partition(b" ")
        if name == b"x-api-key":
            given.add(value)
        elif scheme.lower() == b"bearer":
            given.add(rest.strip())
        else:
            return b""
    return given.pop() if len(given) == 1 else b""


class Cors(msgspec.Struct, frozen=True):
    """Which pages may read answers, and ask with what."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()  # none named: those that the path has
    headers: tuple[str, ...] = ()  # none named: any
    credentials: bool = False

    def answer_headers(self, request: Request) -> Mapping[str, str]:
        """What lets the page that asks read the answer; nothing for others."""
        if not self.origins:
            return {}
        origin = self._origin(request)
        if not origin:
            return {"Vary": "Origin"}
        more = {"Access-Control-Allow-Credentials": "true"} if self.credentials else {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", **more, **_EXPOSED}

    def preflight(self, request: Request, methods: Iterable[str]) -> Answer:
        """A browser asks whether a page may ask; also anybody who asks which methods a path has."""
        allowed = tuple(methods)
        head = {"Allow": ", ".join(allowed)}
        wanted = request.header(b"access-control-request-method")
        if wanted is None or request.header(b"origin") is None:
            return Answer(b"", headers=head, content_type="text/plain")
        if not self._origin(request):
            raise _not_allowed("Origin", "pages of that origin may not ask here; start the router with --allow-origin")
        able = [method for method in allowed if not self.methods or method in self.methods]
        if wanted not in able:
            raise _not_allowed("Access-Control-Request-Method", f"pages may use {', '.join(able) or 'none'} here")
        named = request.header(b"access-control-request-headers") or ""
        asked = [word.strip() for word in named.split(",") if word.strip()]
        known = {name.lower() for name in self.headers}
        for name in asked:
            if _HEADER.fullmatch(name) is None or (known and name.lower() not in known):
                raise _not_allowed("Access-Control-Request-Headers", f"pages may not send {name[:80]!r}")
        head |= {"Access-Control-Allow-Methods": ", ".join(able), "Access-Control-Max-Age": str(PREFLIGHT_S)}
        if asked:
            head["Access-Control-Allow-Headers"] = ", ".join(asked)
        return Answer(b"", headers=head, content_type="text/plain")  # `answer_headers` are added to every answer

    def _origin(self, request: Request) -> str:
        """As it is to be repeated; "" for a page that is not allowed, and where none asks."""
        found = {value.strip() for value in request.values("origin")}
        if len(found) != 1:
            return ""
        origin = found.pop()
        if origin.lower() in self.origins:
            return origin
        return ANY if ANY in self.origins and not self.credentials else ""


_EXPOSED = {"Access-Control-Expose-Headers": "x-request-id, retry-after"}


def _not_allowed(header: str, said: str) -> ApiError:
    return ApiError(403, f"{header}: {said}", type="permission_error", code="foreign_origin", param=header)


def is_method(text: str) -> bool:
    return _METHOD.fullmatch(text) is not None


def is_header_name(text: str) -> bool:
    return _HEADER.fullmatch(text) is not None
