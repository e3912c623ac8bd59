"""Lists of registries, as every option takes them."""

from __future__ import annotations

import pytest

from kvbaton.control.registry import registry_places


def test_names_and_endpoints() -> None:
    assert registry_places("tcp://a:7700") == (("router", "tcp://a:7700"),)
    found = registry_places("tcp://a:7700, b@tcp://[::1]:7700,tcp://10.0.0.1:1", "front")
    assert found == (("front", "tcp://a:7700"), ("b", "tcp://[::1]:7700"), ("front", "tcp://10.0.0.1:1"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not tcp"),
        ("tcp://a:1,", "is not tcp"),
        ("http://a:1", "is not tcp"),
        ("tcp://a", "not host:port"),
        ("a b@tcp://a:1", "is no name"),
        ("@tcp://a:1", "is no name"),
        ("tcp://a:1,b@tcp://a:1", "given twice"),
        ("tcp://0.0.0.0:1", "cannot be dialled"),
        (",".join(f"tcp://a:{n}" for n in range(1, 10)), "at most 8"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        registry_places(text)
