"""The whole plug-in, twice in this process, over tcp: SGLang's queues are a fake, and nothing else is."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.control import keyring as keys
from kvbaton.engines.sglang.bootstrap_stub import BootstrapStub
from kvbaton.engines.sglang.manager import CONFIG_ENV, BatonManager, compat_key, settings_of
from kvbaton.engines.sglang.sglang_layout import NotHandedOver, refusals
from tests.engines.sglang.fake_sglang import FakeDecode, FakePrefill, Memory, Req, first_token, prompt_pair

LIMIT_S = 30.0


def server_args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"device": "cpu", "model_path": "fake", "dtype": "float16", "disaggregation_bootstrap_port": 8998, **changes}
    )


def mode(role: str) -> SimpleNamespace:
    return SimpleNamespace(value=role)


def two_ports() -> int:
    """The first of two free ports, one after the other."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two free ports")


class Pair:
    """P and D with their managers."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, **of_d: Any) -> None:
        keys.mint(str(place / "keys"), ["p0:prefill", "d0:decode"])
        self.port = two_ports()
        self.memories = Memory(), Memory()
        self.managers = []
        for name, role, memory, changes in (
            ("p0", "prefill", self.memories[0], {}),
            ("d0", "decode", self.memories[1], of_d),
        ):
            told = {"name": name, "keys": str(place / "keys"), "transport": "tcp", "model_id": "fake"}
            if name == "d0":
                told["peers"] = {"p0": f"tcp://127.0.0.1:{self.port + 1}"}  # type: ignore[assignment]
            (place / f"{name}.json").write_text(json.dumps(told))
            monkeypatch.setenv(CONFIG_ENV, str(place / f"{name}.json"))
            args = server_args(disaggregation_bootstrap_port=self.port, **changes)
            self.managers.append(BatonManager(memory.kv_args(), mode(role), args))
        self.prefill = FakePrefill(self.managers[0], self.memories[0])
        self.decode = FakeDecode(self.managers[1], self.memories[1])
        self.memories[0].on_free = self.managers[0].handoffs.freed

    def ask(self, pair: tuple[Req, Req]) -> tuple[Req, Req]:
        self.prefill.add(pair[0])
        self.decode.add(pair[1], address=f"127.0.0.1:{self.port}")
        return pair

    def run(self, *reqs: Req) -> None:
        until = time.monotonic() + LIMIT_S
        while not all(req.finished for req in reqs):
            assert time.monotonic() < until, [req.finished for req in reqs]
            for memory in self.memories:
                memory.scribble()
            self.prefill.step()
            self.decode.step()
            time.sleep(0.001)

    def close(self) -> None:
        for manager in self.managers:
            manager.close()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(tmp_path, monkeypatch)
    yield made
    made.close()


def test_prompts_go_from_p_to_d(pair: Pair) -> None:
    pairs = [pair.ask(prompt_pair(length, seed=length)) for length in (1, 9, 31)]
    pair.run(*(req for each in pairs for req in each))
    assert [(p.finished, d.finished, d.answer) for p, d in pairs] == [("length", "length", "right")] * 3
    assert [d.first_token for _, d in pairs] == [first_token(d.origin_input_ids) for _, d in pairs]
    assert pair.managers[1].presence.node.ledger.desk.counts["ends.delivered"] == 3


def test_engines_that_differ_are_never_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another dtype, another page, or another kind."""
    made = Pair(tmp_path, monkeypatch, dtype="bfloat16")
    try:
        p, d = made.ask(prompt_pair(9))
        made.run(d)
        assert "dtype" in d.finished and not d.answer
        made.prefill.abort(p)
        made.run(p)
    finally:
        made.close()


def test_the_key_names_the_kind_of_engine() -> None:
    key = compat_key(Memory().kv_args(), server_args(), "fake")
    assert key["engine"] == "sglang" and key["page"].startswith("4 tokens")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tp_size": 2}, "--tp-size 2"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"dp_size": 2}, "--dp-size 2"),
        ({"enable_dp_attention": True}, "DP attention"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"disaggregation_decode_enable_radix_cache": True}, "radix cache"),
        ({"enable_lora": True}, "LoRA"),
        ({"lora_paths": ["a=b"]}, "LoRA"),
        ({"enable_unified_memory": True}, "unified memory"),
        ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "prefill_complete"),
        ({"disaggregation_decode_host_receive_threshold": 0.5}, "host"),
    ],
)
def test_what_is_not_handed_over_is_refused_at_start(
    changes: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path, monkeypatch)
    with pytest.raises(NotHandedOver, match=named):
        BatonManager(Memory().kv_args(), mode("prefill"), server_args(**changes))


def test_what_sglang_sets_by_itself_is_handed_over() -> None:
    """The defaults of 0.5.17 and 0.5.23."""
    sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "dcp_size", "attn_cp_size", "ep_size"), 1)
    off = dict.fromkeys(
        ("enable_dp_attention", "enable_hisparse", "enable_pd_role_switch", "enable_unified_memory"), False
    )
    unset = dict.fromkeys(("enable_lora", "lora_paths", "speculative_algorithm"), None)
    more = {
        "disaggregation_decode_host_receive_threshold": 1.0,
        "disaggregation_decode_allocation_policy": "early",
        "disaggregation_decode_enable_radix_cache": False,
        "disaggregation_decode_enable_offload_kvcache": False,
    }
    assert list(refusals(Memory().kv_args(), server_args(**sizes, **off, **unset, **more))) == []


def test_staging_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file(tmp_path, monkeypatch)
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    with pytest.raises(NotHandedOver, match="SGLANG_DISAGG_STAGING_BUFFER"):
        BatonManager(Memory().kv_args(), mode("prefill"), server_args())


def test_states_and_drafts_are_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file(tmp_path, monkeypatch)
    args = Memory().kv_args()
    args.state_types, args.num_draft_entries = [mode("mamba"), mode("swa")], 2
    with pytest.raises(NotHandedOver, match=r"layers of mamba, swa.*draft"):
        BatonManager(args, mode("prefill"), server_args())
    args = Memory().kv_args()
    args.kv_item_lens[1] *= 2
    with pytest.raises(NotHandedOver, match="different sizes"):
        BatonManager(args, mode("prefill"), server_args())
    with pytest.raises(NotHandedOver, match="--device npu"):
        BatonManager(Memory().kv_args(), mode("prefill"), server_args(device="npu"))


def _file(place: Path, monkeypatch: pytest.MonkeyPatch, **told: Any) -> None:
    (place / "p0.json").write_text(json.dumps({"name": "p0", "keys": str(place), **told}))
    monkeypatch.setenv(CONFIG_ENV, str(place / "p0.json"))


def test_the_file_is_named_where_it_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=CONFIG_ENV):
        settings_of({})
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        settings_of({CONFIG_ENV: "/nowhere.json"})
    for told, named in (({"colour": 1}, "colour"), ({"turn_s": 5.0}, "turn_s"), ({"lease_s": -1.0}, "lease_s")):
        _file(tmp_path, monkeypatch, **told)
        with pytest.raises(ValueError, match=f"p0.json.*{named}"):
            settings_of()


def test_what_routers_probe_is_answered() -> None:
    stub = BootstrapStub("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{stub.port}/health") as answer:
            assert answer.read() == b"OK"
        with urllib.request.urlopen(f"http://127.0.0.1:{stub.port}/route?prefill_dp_rank=-1") as answer:
            assert json.load(answer)["dp_size"] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{stub.port}/register_dp_rank")
    finally:
        stub.close()
