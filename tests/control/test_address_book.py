"""Addresses lead to workers that are known, however they are written, and to nobody else."""

from __future__ import annotations

import pytest

from kvbaton.api.request_ids import parse_address
from kvbaton.control.addressing import AddressBook, moriio_address, p2p_nccl_address, split_endpoint

ENDPOINTS = {"p0": "tcp://127.0.0.1:7100", "d0": "tcp://[::1]:7200", "d1": "tcp://Host.Example:7300"}


def test_each_worker_is_found_at_its_address_in_any_spelling() -> None:
    book = AddressBook()
    book.replace(ENDPOINTS)
    assert (book.at("127.0.0.1", 7100), book.at("host.example", 7300), len(book)) == ("p0", "d1", 3)
    assert book.at("0:0:0:0:0:0:0:1", 7200) == book.at("[::1]", 7200) == "d0"


def test_an_address_that_nobody_has_leads_nowhere() -> None:
    book = AddressBook()
    assert book.at("127.0.0.1", 7100) is None
    book.replace(ENDPOINTS)
    assert book.at("127.0.0.1", 7101) is None and book.at("10.0.0.1", 7100) is None
    book.replace({"p1": "tcp://127.0.0.1:9"})
    assert book.at("127.0.0.1", 7100) is None, "who is not told of any more is forgotten"


@pytest.mark.parametrize("endpoint", [ENDPOINTS["p0"], ENDPOINTS["d0"]])
def test_both_dialects_name_the_control_socket_so_that_it_is_found_again(endpoint: str) -> None:
    book = AddressBook()
    book.replace({"w": endpoint})
    moriio, nccl = parse_address(moriio_address(endpoint)), parse_address(p2p_nccl_address(endpoint))
    assert (moriio.host, moriio.handshake) == (moriio.host, moriio.notify) == split_endpoint(endpoint)  # type: ignore[union-attr]
    assert (nccl.host, nccl.port) == split_endpoint(endpoint)  # type: ignore[union-attr]
    assert book.at(moriio.host, split_endpoint(endpoint)[1]) == "w"
