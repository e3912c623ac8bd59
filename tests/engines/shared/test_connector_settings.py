"""A configuration that cannot be meant is refused at start, by the name of its field and with what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.api.params import Mode
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.protocol.legality import Role

GOOD: dict[str, Any] = {"name": "p0", "keys": "/keys"}


def test_a_name_and_keys_are_enough() -> None:
    settings = ConnectorSettings.parse(GOOD)
    assert (settings.mode, settings.transport, settings.control_host) == (Mode.PULL, "auto", "127.0.0.1")
    assert settings.protocol().lease_s == settings.lease_s == 15.0


def test_everything_can_be_said() -> None:
    settings = ConnectorSettings.parse(
        GOOD
        | {"registry": "tcp://10.0.0.1:7700", "http_address": "10.0.0.2:8000", "mode": "push", "transport": "tcp"}
        | {"transfer_timeout": 5, "defer_timeout": 6, "claim_timeout": 7, "lease_s": 8, "max_hold_s": 90}
        | {"moriio": {"router": "10.0.0.1:30001", "transfer_mode": "WRITE"}, "layerwise": False, "model_id": "m"}
    )
    assert settings.moriio is not None and settings.moriio.transfer_mode == "WRITE"
    assert settings.protocol().transfer_timeout == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lease": 5}, "kv_connector_extra_config.lease: nobody knows this key"),
        ({"name": "a b"}, "name: got 'a b'"),
        ({"name": 5}, "name"),
        ({"keys": ""}, "keys: got ''"),
        ({"mode": "teleport"}, "mode"),
        ({"modes": ["pull"], "mode": "push"}, "mode: got 'push', expected one of modes, pull"),
        ({"transport": "rdma"}, "transport"),
        ({"control_port": 70000}, "control_port: got 70000"),
        ({"lease_s": 0}, "lease_s: got 0.0, expected seconds"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": 200}, "max_hold_s: 180.0 is below lease_s 200"),
        ({"transfer_timeout": "30"}, "transfer_timeout"),
        ({"registry": "10.0.0.1:7700", "http_address": "a:1"}, "registry: "),
        ({"registry": "tcp://10.0.0.1:7700"}, "http_address: got ''"),
        ({"registry": "tcp://10.0.0.1:1,b@10.0.0.2:1", "http_address": ""}, "registry: "),
        ({"moriio": {"router": "a:1"}, "http_address": ""}, "http_address: got ''"),
        ({"registry": "tcp://10.0.0.1:1", "http_address": "a:1", "peers": {"d0": "tcp://10.0.0.1:2"}}, "peers: got"),
        ({"peers": {"d 0": "tcp://10.0.0.1:2"}}, "peers.d 0"),
        ({"peers": {"d0": "10.0.0.1"}}, "peers.d0: "),
        ({"http_address": "http://a:1"}, "http_address: "),
        ({"moriio": {"router": "x"}, "http_address": "a:1"}, "moriio.router: "),
        ({"moriio": {"router": "a:1", "transfer_mode": "read"}, "http_address": "a:1"}, "transfer_mode"),
        ({"fault_copy_delay_s": -1}, "fault_copy_delay_s"),
        ({"copy_share": 0}, "copy_share"),
        ({"copy_share": 1.5}, "copy_share"),
        ({"pin_share": 0}, "pin_share: got 0.0, expected a share of the cache"),
        ({"pin_share": 1.5}, "pin_share"),
        ({"pin_share": float("nan")}, "pin_share"),
        ({"pin_wait_s": 0}, "pin_wait_s: got 0.0, expected seconds"),
        ({"checksum": "some"}, "checksum"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refusal:
        ConnectorSettings.parse(GOOD | change)
    assert named in str(refusal.value)


@pytest.mark.parametrize("missing", ["name", "keys"])
def test_what_is_missing_is_named_with_the_next_step(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing}: got None.*kvbaton keys new"):
        ConnectorSettings.parse({key: value for key, value in GOOD.items() if key != missing})


def test_an_engine_inside_another_server_says_so_and_registers_with_several() -> None:
    several = "tcp://10.0.0.1:7700,registry-b@tcp://10.0.0.2:7700"
    settings = ConnectorSettings.parse({"name": "p0", "keys": "k", "registry": several, "http_address": ""})
    assert settings.http_address == "" and settings.registry == several


def test_one_configuration_for_all_replicas_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    told: dict[str, Any] = {
        "name": "auto", "join_token_file": "/run/token", "registry": "tcp://10.0.0.1:7700", "control_host": "auto",
        "http_address": "auto:8000",
    }  # fmt: skip
    settings = ConnectorSettings.parse(told).settled()
    assert settings.joins and not settings.is_alone
    assert (settings.control_host, settings.http_address) == ("10.1.2.3", "10.1.2.3:8000")
    asked = settings.credentials(Role.DECODE, "r1")
    assert (asked.name, asked.role, asked.join_token_file) == ("auto.r1", Role.DECODE, "/run/token")
    secret = "kvbt1-" + "x" * 40
    inline = ConnectorSettings.parse({**told, "join_token_file": "", "join_token": secret})
    assert secret not in repr(inline) and secret not in repr(inline.credentials(Role.BOTH))
    with pytest.raises(ValueError, match="keys"):
        ConnectorSettings.parse({**told, "join_token_file": ""})
    monkeypatch.setenv("KVBATON_JOIN_TOKEN", secret)
    assert ConnectorSettings.parse({**told, "join_token_file": ""}).joins
    assert not ConnectorSettings.parse(GOOD).joins  # who has keys uses them
