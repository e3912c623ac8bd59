"""Servers and prompts of the part `sglang`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvbaton.api.params import CONTROL_AFTER_BOOTSTRAP
from kvbaton.engines.sglang.manager import CONFIG_ENV, settings_of
from kvbaton.engines.vllm.launch import launching
from kvbaton.engines.vllm.models.tiny_model import POSITIONS_MAX, POSITIONS_MAX_8B
from kvbaton.processes.child_process import is_free
from kvbaton_proof.gpu_test import gpu_sglang, sglang_servers
from kvbaton_proof.gpu_test.sglang_servers import CPU_SIZES, PAGE_TOKENS, TIMED, SglangSizes
from kvbaton_proof.rig.connectors import NIXL_BEST
from kvbaton_proof.rig.oracle import Right


def test_prompts_end_around_pages_and_chunks_and_some_begin_as_others_do() -> None:
    for sizes in (CPU_SIZES, SglangSizes()):
        prompts = gpu_sglang.prompts_of(sizes)
        lengths = {len(each) for each in prompts}
        assert {1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, sizes.chunk_tokens, sizes.longest} <= lengths
        assert len(prompts) > sizes.prompts and max(lengths) <= sizes.longest + 37
        assert max(lengths) + gpu_sglang.TOKENS <= POSITIONS_MAX and sizes.longest > 3 * sizes.chunk_tokens
        beginnings = [tuple(each[:PAGE_TOKENS]) for each in prompts if len(each) > 3 * PAGE_TOKENS]
        assert len(set(beginnings)) < len(beginnings)


def test_what_is_timed_has_a_shape_whose_context_holds_it_and_answers_that_nobody_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "tiny_model", lambda _python, kind, _seed: tmp_path / kind)
    alone, (ours, _) = sglang_servers.servers("python", tmp_path, tmp_path, "cuda", TIMED)
    words = list(alone.command)
    assert words[words.index("--model-path") + 1] == str(tmp_path / "8b") and max(TIMED.timed_tokens) < POSITIONS_MAX_8B
    assert words[words.index("--dtype") + 1 :][:3] == ["bfloat16", "--load-format", "dummy"]
    assert max(TIMED.timed_tokens) < TIMED.pool_tokens
    p, d = (settings_of(engine.variables) for engine in (ours.p, ours.d))
    assert p.model_id == d.model_id == "8b-dummy" and not d.fault_misplace_while


def test_answers_of_other_prompts_do_not_pass() -> None:
    rights = [Right(tuple(f"{number} {at}" for at in range(6)), (1.0,) * 6) for number in range(3)]
    known = [([number], right) for number, right in enumerate(rights)]
    assert gpu_sglang.unlike_the_next(known) == 3
    assert gpu_sglang.unlike_the_next([([0], rights[0]), ([1], rights[0])]) == 0


def test_p_and_d_differ_from_the_one_engine_in_their_disaggregation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "tiny_model", lambda *_: tmp_path)
    alone, pairs = sglang_servers.servers("python", tmp_path, tmp_path, "cuda", SglangSizes())
    assert [pair.backend for pair in pairs] == ["kvbaton", "nixl"] and [pair.is_routed for pair in pairs] == [
        True,
        False,
    ]
    for pair in pairs:
        assert is_free("127.0.0.1", pair.bootstrap_port + CONTROL_AFTER_BOOTSTRAP)
        for engine, mode in ((pair.p, "prefill"), (pair.d, "decode")):
            words, same = list(engine.command), list(alone.command)
            same[same.index("--port") + 1] = str(engine.port)
            assert words[: len(same)] == same and words[len(same) :] == [
                "--disaggregation-mode", mode, "--disaggregation-transfer-backend", pair.backend,
                "--disaggregation-bootstrap-port", str(pair.bootstrap_port),
            ]  # fmt: skip
    ours, nixl = pairs
    assert nixl.p.variables.items() >= NIXL_BEST.items()
    settings = settings_of(ours.d.variables)
    assert settings.fault_misplace_while == str(ours.flag)
    assert settings_of({CONFIG_ENV: ours.p.variables[CONFIG_ENV]}).name == "p0"
    assert msgspec.json.decode(Path(ours.p.variables[CONFIG_ENV]).read_bytes())["registry"] == settings.registry
