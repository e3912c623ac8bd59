"""What the fuzzed modules share: a test that proves how many cases it ran, and ways to make and damage input.

Law: counts are of cases that ran, not of cases asked for; a strategy that runs dry fails its test.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

NIGHTLY = os.environ.get("KVBATON_FUZZ") == "nightly"
PROFILE = settings.get_profile("nightly" if NIGHTLY else "make-test")
TIMEOUT_S = 1200  # of one test; in `make test` these have the lowest priority
CASES_MIN = 20_000 if NIGHTLY else 2_000  # of each family of parsers

Check = Callable[..., None]


class Family:
    """The fuzzed tests of one family of parsers; a family of few tests needs more `examples` than the profile's."""

    def __init__(self, examples: int = 0) -> None:
        self.tests = 0
        self.examples = max(examples, PROFILE.max_examples)

    def fuzz(self, *strategies: st.SearchStrategy[Any]) -> Callable[[Check], Callable[[], None]]:
        """`@given`, under the profile, failing also when fewer cases ran than the profile says."""
        self.tests += 1

        def decorate(check: Check) -> Callable[[], None]:
            ran = 0

            def counted(**values: object) -> None:
                nonlocal ran
                ran += 1
                check(**values)

            case = given(*strategies)(check)
            case.hypothesis.inner_test = counted

            def test() -> None:
                nonlocal ran
                ran = 0
                settings(PROFILE, max_examples=self.examples)(case)()
                assert ran >= self.examples, f"{ran} cases ran, of {self.examples}"

            test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
            return test

        return decorate

    @property
    def cases(self) -> int:
        """How many cases run when every test of the family passes."""
        return self.tests * self.examples


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)
values: st.SearchStrategy[object] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(-9, 99), inner, max_size=4)
    ),
    max_leaves=12,
)
"""Whatever msgpack can say, in small."""

put_in = st.text(max_size=4) | st.sampled_from(["___", "65536", "99999", "0", ":", "[", "]", ",", ".", "_", "%1"])
text_edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 4), put_in), min_size=1, max_size=4)


def damaged_text(text: str, damage: list[tuple[int, int, str]]) -> str:
    """The text with a few characters cut out and put in."""
    for at, cut, put in damage:
        at %= len(text) + 1
        text = text[:at] + put + text[at + cut :]
    return text


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


ports = st.integers(1, 65_535)
names = st.builds(
    "{}x{}9{}".format,
    st.sampled_from(["", "a.", "0.1.", "a-b.c_d."]),
    st.text("abz059-", max_size=40),
    st.sampled_from(["", ".local", ".svc.cluster", ".0x7g", f".{'l' * 63}.{'m' * 63}"]),
)
hosts = st.one_of(
    names,
    st.integers(0, (1 << 32) - 1).map(lambda number: str(ipaddress.IPv4Address(number))),
    st.integers(0, (1 << 128) - 1).map(lambda number: str(ipaddress.IPv6Address(number))),
    st.sampled_from(["127.0.0.1", "0.0.0.0", "224.0.0.1", "::", "::1", "ff02::1", "::ffff:102:304", "2001:db8::1"]),
)
"""In canonical form; some of the addresses lead nowhere."""


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def leads_somewhere(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return not (address.is_unspecified or address.is_multicast)


dialable = hosts.map(lambda host: host if leads_somewhere(host) else "10.0.0.1")
