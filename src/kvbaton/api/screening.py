"""Checks on a request with a body before the body is read, shared by router and worker.

Laws: a body is taken as the bytes that came: nothing is inflated, so nobody's few bytes become gigabytes here or in the
worker behind. A web page of another site asks nothing: a browser sends its forms and plain texts anywhere without
asking first, and says in `Origin` where they come from; who is no browser says nothing and is not affected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from kvbaton.api.api_errors import ApiError

GetAll = Callable[[str], Sequence[str]]
"""Every value of a header, by its name in lower case."""

_PLAIN = frozenset({"", "identity"})
_WHOLE = frozenset({"", "chunked"})
_OWN_SITES = frozenset({"", "same-origin", "none"})
_HOST = re.compile(rb"\s*(?:[A-Za-z0-9._~%!$&'()*+;=-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?\s*")
_PORTS = {"http": ":80", "https": ":443"}


def check_host(hosts: Sequence[str | bytes], *, is_new: bool) -> None:
    """`ApiError` (400) unless there is one `Host`, as RFC 9112 asks of HTTP/1.1; whom two of them mean is a guess.

    A proxy in front may have gone by the other one. Before HTTP/1.1 (`is_new`) it may be left out.
    """
    if len(hosts) == 1 and _HOST.fullmatch(hosts[0] if isinstance(hosts[0], bytes) else hosts[0].encode("latin-1")):
        return
    if hosts or is_new:
        said = "no host name" if len(hosts) == 1 else f"{len(hosts)} of them"
        raise ApiError(400, f"Host: got {said}, expected one, as host or host:port", param="Host", code="bad_request")


def check(values: GetAll, origins: Collection[str] = ()) -> None:
    """`ApiError` for a request that is not taken, whatever is in its body. `origins`: other sites that may ask."""
    for name, taken in (("Content-Encoding", _PLAIN), ("Transfer-Encoding", _WHOLE)):
        for coding in _words(values(name.lower())):
            if coding not in taken:
                said = f"{name}: got {coding[:40]!r}; send the body unencoded, without it"
                raise ApiError(415, said, param=name, code="encoded_body")
    _check_origin(values, origins)


def _check_origin(values: GetAll, origins: Collection[str]) -> None:
    found = [value.strip().lower() for value in values("origin")]
    if found and ("*" in origins or all(origin in origins for origin in found)):
        return
    hosts = [value.strip().lower() for value in values("host")]
    foreign = next((origin for origin in found if not is_same(origin, hosts)), "")
    if not foreign and not any(word not in _OWN_SITES for word in _words(values("sec-fetch-site"))):
        return
    said = f"Origin: got {(foreign or 'another site')[:80]!r}; requests from other sites' web pages are refused"
    raise ApiError(403, said, type="permission_error", code="foreign_origin", param="Origin")


def is_same(origin: str, hosts: Sequence[str]) -> bool:
    """Whether a page of this origin came from where it asks: by the one `Host`, since TLS may end before this door."""
    scheme, _, place = origin.partition("://")
    if len(hosts) != 1 or not place or scheme not in _PORTS:
        return False
    return place.removesuffix(_PORTS[scheme]) == hosts[0].removesuffix(_PORTS[scheme])


def _words(values: Sequence[str]) -> list[str]:
    return [word.strip().lower() for value in values for word in value.split(",")]
