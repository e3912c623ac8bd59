"""The distribution: its transport is known by the entry point, and listens on loopback; nonsense is no endpoint."""

from __future__ import annotations

import contextlib
import tomllib
import zlib
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire_numbers import numbers_in

import kvbaton
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports import catalogue
from kvbaton.transports.builtin_entries import DISTRIBUTIONS
from kvbaton_mori import endpoint
from kvbaton_mori.transport import ENTRY, MoriConfig

PEER = PeerId(WorkerId("p"), Incarnation(1))
ABOUT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip would have it: the entry points of this package's pyproject.toml, and no other's."""
    named = ABOUT["entry-points"][catalogue.GROUP]
    points = {name: (EntryPoint(name, at, catalogue.GROUP),) for name, at in named.items()}
    monkeypatch.setattr(catalogue, "claims", lambda: points)
    monkeypatch.setattr(catalogue, "load", catalogue.load.__wrapped__)


@pytest.mark.usefixtures("_installed")
def test_it_is_found_by_its_entry_point_and_offered_by_name_alone() -> None:
    assert DISTRIBUTIONS["mori"] == ABOUT["name"] and catalogue.parse("mori,tcp") == ("mori", "tcp")
    assert catalogue.plane_of("mori").what == ENTRY.what and catalogue.problem_of(ENTRY, "mori") == ""
    assert "mori" not in catalogue.offered("auto") and not catalogue.capabilities("mori").enforces
    with pytest.raises(ValueError, match="host: 'somewhere'; mori requires"):
        catalogue.check_host("mori", "somewhere")
    with pytest.raises(OSError, match=r"mori cannot be used here: .*install amd_mori"):
        catalogue.offered("mori")


def test_it_goes_with_the_kvbaton_of_its_own_release() -> None:
    assert ABOUT["version"] == kvbaton.__version__ and f"kvbaton=={kvbaton.__version__}" in ABOUT["dependencies"]


def test_the_default_host_is_loopback_and_every_number_of_an_endpoint_is_bounded() -> None:
    assert MoriConfig().host == "127.0.0.1"
    assert [number.path for number in numbers_in(endpoint._Described) if not number.is_bounded] == []


@given(st.binary(max_size=1024), st.booleans())
def test_whatever_a_peer_sends_is_an_endpoint_within_bounds_or_refused(data: bytes, packed: bool) -> None:
    with contextlib.suppress(ValueError):
        found = endpoint.parse(data if packed else endpoint.VERSION + zlib.compress(data, 1))
        assert len(found.regions) <= endpoint.REGIONS_MAX


@given(
    st.dictionaries(
        st.integers(0, 8), st.lists(st.binary(max_size=8) | st.integers(0, (1 << 64) - 1), min_size=2, max_size=3)
    )
)
def test_an_endpoint_arrives_as_it_was(regions: dict[int, list[bytes | int]]) -> None:
    sent = endpoint.MoriEndpoint(
        PEER, b"engine", {number: msgspec.msgpack.encode(row) for number, row in regions.items()}
    )
    assert endpoint.parse(endpoint.pack(sent)) == sent
