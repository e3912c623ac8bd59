"""Which data-parallel rank an engine is, who it is in the cluster, and how routers of MoRI-IO find it; without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.api.params import Mode
from kvbaton.control import keyring
from kvbaton.control.addressing import ControlError
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.shared.store_setup import keyring_of
from kvbaton.engines.side.asks import ForeignLookup, ParamsSource, Target, ask_of
from kvbaton.engines.vllm.block_pool import Pace
from kvbaton.engines.vllm.config.data_parallel import DataParallelPlace, place_of
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import Ticket, unseal

KEY = b"k" * 32
HEX = "0123456789abcdef" * 2
P_AT, D_AT = "host:10.0.0.1,handshake:7100,notify:7100", "host:10.0.0.2,handshake:7200,notify:7200"
ID = f"cmpl-___prefill_addr_{P_AT}___decode_addr_{D_AT}_{HEX}-0-12345678"


def config(engine_id: str = "0f3a", **parallel: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id), parallel_config=SimpleNamespace(**parallel)
    )


DENSE = {"data_parallel_size": 1, "data_parallel_rank": 0}
"""What vLLM tells each rank of a dense model."""


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({}, None),
        ({"data_parallel_size": 1, "data_parallel_index": 0, "data_parallel_rank_local": 0}, None),
        ({**DENSE, "engine_id": "a_dp0", "data_parallel_index": 0, "elastic_ep_max_dp_size": 3}, (0, 3, 0, 3)),
        ({**DENSE, "engine_id": "a_dp1", "data_parallel_index": 1, "elastic_ep_max_dp_size": 3}, (1, 3, 1, 3)),
        ({**DENSE, "engine_id": "a_dp0", "data_parallel_index": 0}, (0, 2, 0, 2)),
        ({**DENSE, "data_parallel_index": 4}, (4, 5, 4, 5)),
        ({"data_parallel_size": 4, "data_parallel_index": 2, "data_parallel_rank": 2}, (2, 4, 2, 4)),
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "elastic_ep_max_dp_size": None}, (0, 4, 0, 4)),
        (
            {**DENSE, "data_parallel_index": 3, "data_parallel_external_lb": True, "elastic_ep_max_dp_size": 4},
            (3, 4, 0, 1),
        ),
        (
            {**DENSE, "data_parallel_index": 3, "data_parallel_hybrid_lb": True, "data_parallel_rank_local": 1},
            (3, 4, 1, 2),
        ),
        (
            {**DENSE, "data_parallel_index": 2, "data_parallel_hybrid_lb": True, "data_parallel_rank_local": 0},
            (2, 3, 0, 2),
        ),
    ],
)
def test_a_rank_is_known_however_vllm_tells_it(told: dict[str, Any], place: tuple[int, ...] | None) -> None:
    found = place_of(config(**told))
    assert found == (None if place is None else DataParallelPlace(*place))


def test_a_child_of_a_multi_connector_is_a_rank_by_the_outer_engine_id() -> None:
    assert place_of(config(**DENSE), config("outer_dp0")) == DataParallelPlace(0, 2, 0, 2)


def test_each_rank_has_a_name_and_a_port_of_its_own() -> None:
    given = ConnectorSettings.parse({"name": "p0", "keys": "/keys", "control_port": 7100})
    ranks = [given.of_rank(rank) for rank in (0, 1, 12)]
    assert [(rank.name, rank.control_port) for rank in ranks] == [("p0.dp0", 7100), ("p0.dp1", 7101), ("p0.dp12", 7112)]
    assert ConnectorSettings.parse({"name": "p0", "keys": "/keys"}).of_rank(1).control_port == 0, "any that is free"
    with pytest.raises(ValueError, match="control_port: got 65536"):
        ConnectorSettings.parse({"name": "p0", "keys": "/keys", "control_port": 65535}).of_rank(1)
    with pytest.raises(ValueError, match="name: got"):
        ConnectorSettings.parse({"name": "p" * 62, "keys": "/keys"}).of_rank(1)


def test_a_missing_key_is_told_with_the_command_that_mints_it(tmp_path: Path) -> None:
    keyring.mint(tmp_path / "keys", ["p0:prefill", "p0.dp0"])
    settings = ConnectorSettings.parse({"name": "p0", "keys": str(tmp_path / "keys")})
    assert keyring_of(settings.of_rank(0)).name == "p0.dp0"
    with pytest.raises(ControlError, match=r"p0.dp2.json is missing.*keys add .*keys p0.dp0:ROLE .*p0.dp2:ROLE"):
        keyring_of(settings.of_rank(2))
    with pytest.raises(ControlError, match="is missing; add that identity") as plain:
        keyring_of(ConnectorSettings.parse({"name": "p9", "keys": str(tmp_path / "keys")}))
    assert "data-parallel" not in str(plain.value)


class TestMoriioWrite:
    """Routers of MoRI-IO know one address for all ranks of an engine, and tell each leg the other's rank."""

    BOOK = {  # noqa: RUF012
        ("10.0.0.1", 7100): WorkerId("p0.dp0"), ("10.0.0.2", 7200): WorkerId("d0.dp0"),
        ("10.0.0.3", 7300): WorkerId("d1"),
    }  # fmt: skip

    def asked(self, me: str, request_id: str = ID, **more: Any) -> Ticket:
        side = "do_remote_decode" if me.startswith("p") else "do_remote_prefill"
        params = {side: True, "transfer_id": f"tx-{HEX}", **more}
        lookup = ForeignLookup(Mode.PUSH, tuple(Mode), WorkerId(me), KEY, 60.0, lambda *at: self.BOOK.get(at))
        ask = ask_of(SimpleNamespace(kv_transfer_params=params, request_id=request_id), lookup)
        assert isinstance(ask, ParamsSource if me.startswith("p") else Target) and ask.ticket is not None
        return unseal(ask.ticket, [KEY], 0)

    @pytest.mark.parametrize(("p", "d"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)])
    def test_both_legs_come_to_the_same_two_ranks(self, p: int, d: int) -> None:
        at_p, at_d = self.asked(f"p0.dp{p}", remote_dp_rank=d), self.asked(f"d0.dp{d}", remote_dp_rank=p)
        assert (at_p.handoff, at_p.source, at_p.target) == (at_d.handoff, at_d.source, at_d.target)
        assert (at_p.source, at_p.target) == (f"p0.dp{p}", f"d0.dp{d}")

    def test_an_unpinned_peer_is_its_first_rank_as_with_mori_io(self) -> None:
        assert self.asked("p0.dp1").target == "d0.dp0"

    def test_a_peer_without_ranks_is_itself_whatever_rank_is_named(self) -> None:
        to_one = ID.replace("10.0.0.2", "10.0.0.3").replace("7200", "7300")
        at_p, at_d = self.asked("p0.dp1", to_one, remote_dp_rank=0), self.asked("d1", to_one, remote_dp_rank=1)
        assert (at_p.source, at_p.target) == (at_d.source, at_d.target) == ("p0.dp1", "d1")

    @pytest.mark.parametrize("rank", [-1, 1 << 40, "1", 1.0, True, None, [1]])
    def test_what_is_no_rank_is_refused_by_name(self, rank: object) -> None:
        with pytest.raises(ProtocolError, match="remote_dp_rank") as refusal:
            self.asked("p0.dp0", remote_dp_rank=rank)
        assert refusal.value.reason is Reason.BAD_MESSAGE

    def test_a_request_for_another_engine_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match=r"this is d9\.dp0"):
            self.asked("d9.dp0", remote_dp_rank=0)


@pytest.mark.parametrize(("lock_step", "naps"), [(False, [0.5]), (True, [])])
def test_an_idle_rank_in_lock_step_takes_no_nap(lock_step: bool, naps: list[float]) -> None:
    """vLLM steps a rank that only holds a lease; in lock-step all other ranks would wait for the end of its nap."""
    pace, taken = Pace(lock_step=lock_step), []
    pace.begin(computes=False)
    pace.nap = taken.append  # type: ignore[method-assign]
    pace.nap_once(0.5)
    pace.nap_once(0.5)
    assert taken == naps
