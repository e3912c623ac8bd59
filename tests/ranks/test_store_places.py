"""Where a store is, as an operator writes it: read once, refused by name."""

from __future__ import annotations

import pytest
import zmq

from kvbaton.control.addressing import ControlError
from kvbaton.control.keyring import Keyring
from kvbaton.protocol.ids import WorkerId
from kvbaton.ranks.store_trust import LEND_BYTES, Mooncake, Served, bytes_of, opener, store_place
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.store.tcp_backend import LinedBackend


def keyring(*names: str) -> Keyring:
    pairs = {name: tuple(key.decode() for key in zmq.curve_keypair()) for name in ("p0", *names)}
    peers = {WorkerId(name): public for name, (public, _) in pairs.items()}
    return Keyring(WorkerId("p0"), *pairs["p0"], peers, ())


def test_places_are_read() -> None:
    assert store_place("tcp://10.0.0.1:7710") == Served("tcp://10.0.0.1:7710")
    assert store_place("tcp://storehost:7710") == Served("tcp://storehost:7710")
    plain = MooncakeSettings(master="10.0.0.1:50051", segment_bytes=LEND_BYTES)
    assert store_place("mooncake://10.0.0.1:50051") == Mooncake(plain)
    full = store_place("mooncake://m:1?lend=1GiB&host=10.0.0.2&protocol=rdma&devices=mlx5_0&metadata=http://h:1/m")
    assert full == Mooncake(
        MooncakeSettings(
            master="m:1", segment_bytes=1 << 30, host="10.0.0.2", protocol="rdma", devices="mlx5_0",
            metadata="http://h:1/m",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory", "is not tcp://host:port of a kvbaton store, or mooncake://"),
        ("redis://h:1", "is not tcp://"),
        ("tcp://host", "host"),
        ("tcp://0.0.0.0:1", "cannot be dialled"),
        ("mooncake://", "port"),
        ("mooncake://h:1/path", "is not tcp://"),
        ("mooncake://h:1?lend=lots", "'lots' is not a size"),
        ("mooncake://h:1?color=red", "'color' is not one of lend, host"),
    ],
)
def test_what_is_no_place_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        store_place(text)


@pytest.mark.parametrize("text", ["", "-1", "1.5GiB", "4 GiB", "4GB", "9" * 16])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        bytes_of(text)


def test_a_served_store_needs_its_key_and_is_shared_by_ranks() -> None:
    with pytest.raises(ControlError, match="kvbaton keys add DIR store"):
        opener(Served("tcp://127.0.0.1:1"), keyring())
    make, owned = opener(Served("tcp://127.0.0.1:1"), keyring("store"), ranks=4)
    backend = make()
    assert isinstance(backend, LinedBackend) and not owned
    backend.close()


def test_what_is_lent_to_mooncake_is_lent_by_all_ranks_together() -> None:
    make, owned = opener(store_place("mooncake://h:1?lend=64MiB"), keyring(), ranks=4)
    backend = make()
    assert isinstance(backend, MooncakeBackend) and owned
    assert backend._settings.segment_bytes == 16 << 20
