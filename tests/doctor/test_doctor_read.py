"""Configurations as operators have them: JSON, YAML, a command; from a file or as a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbaton.doctor import config_reading
from kvbaton.doctor.config_checks import examine
from kvbaton.doctor.config_reading import Launch, UnreadableError, parse, read

TRANSFER = {"kv_connector": "BatonConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"name": "p0"}}
TEXT = json.dumps(TRANSFER)
P = "--name p0 --role prefill --keys k --registry tcp://h:1"
COMMANDS = [
    f"vllm serve org/m --port 8100 -tp 2 --enforce-eager --kv-transfer-config '{TEXT}'",
    f"#!/bin/sh\nexport A=1\nset -e; vllm serve org/m \\\n  --port=8100 -tp 2 \\\n  --enforce-eager "
    f"--kv-transfer-config '{TEXT}' && echo --port 9",
    f"env A=1 python -m vllm.entrypoints.openai.api_server --model org/m --port 8100 --tensor-parallel-size 2 "
    f"--enforce-eager --kv_transfer_config='{TEXT}' # as it was",
]


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command(text: str) -> None:
    launch = parse("prefill", "here", text)
    assert launch.transfer == TRANSFER
    assert launch.options == {"model": "org/m", "port": "8100", "tensor_parallel_size": "2", "enforce_eager": True}
    assert launch.variables.get("A") == ("1" if "A=1" in text else None)


@pytest.mark.parametrize("transfer", [TRANSFER, TEXT])
def test_a_launch_as_json(transfer: object) -> None:
    launch = parse("decode", "here", json.dumps({"model": "m", "block-size": 32, "kv-transfer-config": transfer}))
    assert launch.transfer == TRANSFER and launch.option("block_size") == "32" and launch.option("port") == ""


def test_the_value_of_the_flag_alone_knows_no_launch() -> None:
    assert parse("prefill", "here", TEXT) == Launch(side="prefill", where="here", transfer=TRANSFER)


def test_a_worker_of_our_own() -> None:
    launch = parse("prefill", "here", "/opt/bin/kvbaton worker --name p0 --role prefill & wait")
    assert launch.worker == ("--name", "p0", "--role", "prefill")


def test_yaml_is_read() -> None:
    text = f"model: m\nport: 8100\nkv-transfer-config: '{TEXT}'\n"
    assert parse("prefill", "here", text).option("port") == "8100"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "YAML"),
        ('{"model": "m"}', "no kv-transfer-config"),
        ('{"kv-transfer-config": 5}', "no kv-transfer-config"),
        ("vllm serve m --kv-transfer-config", "has no value"),
        ("vllm serve m --kv-transfer-config '{", "not a command"),
        ("vllm serve m --kv-transfer-config '{\"a'", "not JSON"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, said: str) -> None:
    with pytest.raises(UnreadableError, match=said):
        parse("prefill", "here", text)


def test_a_file_and_its_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p 0.json"
    path.write_text(TEXT)
    launch, found = read("prefill", str(path))
    assert launch is not None and launch.where == f"--prefill {path}" and found == []
    path.write_bytes(b"\xff\xfe")
    assert [each.found for each in read("prefill", str(path))[1]] == ["not UTF-8 text"]
    monkeypatch.setattr(config_reading, "TEXT_BYTES_MAX", 10)
    path.write_text(TEXT)
    assert [each.found for each in read("prefill", str(path))[1]] == ["more than 10 bytes"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--name p0 --role decode --keys k", "setting-invalid", "--registry"),
        ("--name p0 --role prefill --registry tcp://h:1", "keys-missing", "--keys"),
        ("--name p0 --role decode --keys k --registry tcp://h:1", "role-wrong", "role: got decode"),
        (f"{P} --lese-s 3", "setting-unknown", "--lese-s"),
        (f"{P} --http-port 99999", "port-range", "65535"),
        (f"{P} --transfer-timeout 999", "time-contradiction", "999 s"),
        (f"{P} --http-host 0.0.0.0 --http-access open", "http-open", "open on"),
        ("--name p0 --role nobody --keys k --registry tcp://h:1", "setting-invalid", "nobody"),
    ],
)
def test_a_worker_of_our_own_is_held_to_its_own_options(words: str, code: str, said: str) -> None:
    _, found = examine(parse("prefill", "here", f"kvbaton worker {words}"))
    assert [each.code for each in found] == [code] and said in found[0].found
    if code == "setting-unknown":
        assert found[0].fix == "did you mean --lease-s?"


def test_one_bad_setting_does_not_hide_the_next() -> None:
    extra = {
        "name": "p0",
        "keys": "k",
        "lease_s": -1,
        "ticket_ttl_s": 9999,
        "control_port": -5,
        "moriio": {"router": 3},
    }
    launch = Launch(side="prefill", where="here", transfer={**TRANSFER, "kv_connector_extra_config": extra})
    engine, found = examine(launch)
    assert sorted(each.code for each in found if each.code != "policy-default") == [
        "module-path", "port-range", "setting-invalid", "setting-invalid", "ticket-ttl",
    ]  # fmt: skip
    assert engine.settings is not None and engine.settings.name == "p0"
