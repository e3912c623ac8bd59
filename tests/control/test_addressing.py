from __future__ import annotations

import pytest

from kvbaton.control.addressing import check_authority, check_bind, check_endpoint
from kvbaton.observe.codes.entry import worth_saying


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:5000", "tcp://[::1]:5000", "tcp://10.1.2.3:65535", "tcp://[fd00::1:2]:1"]
)
def test_a_numeric_endpoint_can_be_advertised(text: str) -> None:
    assert check_endpoint(text) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not tcp://"),
        ("127.0.0.1:5000", "not tcp://"),
        ("ipc:///tmp/x", "not tcp://"),
        ("tcp://", "not tcp://"),
        ("tcp://127.0.0.1", "host:port"),
        ("tcp://127.0.0.1:0", "port 0"),
        ("tcp://127.0.0.1:65536", "port 65536"),
        ("tcp://[::zz]:5", "host:port"),
        ("tcp://[1:2]:5", "not an IPv6"),
        ("tcp://::1:5", "host:port"),
        ("tcp://0.0.0.0:5", "cannot be dialled"),
        ("tcp://[::]:5", "cannot be dialled"),
        ("tcp://239.0.0.1:5", "cannot be dialled"),
        ("tcp://*:5", "host:port"),
        ("tcp://some-host:5", "numeric"),
        ("tcp://127.0.0.1:5;tcp://127.0.0.2:5", "host:port"),
        ("tcp://127.0.0.1:5\n", "host:port"),
        ("tcp://127.0.0.1:٥", "host:port"),
    ],
)
def test_an_endpoint_that_cannot_be_advertised_is_refused_with_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        check_endpoint(text)


def test_only_an_operator_may_name_a_host() -> None:
    assert check_endpoint("tcp://router.svc:5", names=True) == "tcp://router.svc:5"


def test_a_bind_may_ask_for_a_free_port_and_for_every_interface() -> None:
    assert check_bind("tcp://127.0.0.1:0") and check_bind("tcp://0.0.0.0:7") and check_bind("tcp://[::]:0")
    with pytest.raises(ValueError, match="not tcp"):
        check_bind("127.0.0.1:0")


@pytest.mark.parametrize("text", ["http://host:80", "host", "host:", "[::1]", "a b:80", "host:80/path", "host:0"])
def test_an_http_address_is_an_authority_without_scheme_or_path(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|port 0"):
        check_authority(text)
    assert check_authority("host:80") and check_authority("[::1]:80") and check_authority("127.0.0.1:80")


def test_a_report_that_repeats_is_logged_ever_more_rarely() -> None:
    assert [n for n in range(1, 100) if worth_saying(n)] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64]
