"""The engine alone: whatever it does to save work or room, the answers are those of the textbook."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_config import ModelConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, RejectedError, RequestStatus, Sampling
from kvbaton.engines.embedded.hooks import BlockIds, Chunk, Connector
from kvbaton.engines.embedded.model.decoder import Model
from kvbaton.protocol.ids import RequestId

from .helpers import SLIDING, TINY, answer_alone, answers, engine, finish, naive_logits, prompt, request, step


def textbook_answer(config: ModelConfig, tokens: tuple[int, ...], count: int) -> list[int]:
    """Everything computed anew for each token, nothing kept."""
    model, told = Model(config), list(tokens)
    allowed = [token for token in tokenizer.SPEAKABLE if token != tokenizer.EOS]
    for _ in range(count):
        logits = naive_logits(model, told)[-1]
        told.append(max(allowed, key=lambda token: logits[token]))
    return told[len(tokens) :]


@pytest.mark.parametrize("config", [ModelConfig(), TINY, SLIDING])
@pytest.mark.parametrize("length", [1, 7, 40, 130])
def test_an_answer_is_the_textbooks(config: ModelConfig, length: int) -> None:
    tokens = prompt(length, length)
    assert answer_alone(tokens, 12, config) == textbook_answer(config, tokens, 12)


@pytest.mark.parametrize("config", [TINY, SLIDING])
@pytest.mark.parametrize("changes", [{}, {"tp": 2, "layout": "BL"}, {"block_tokens": 32}, {"step_tokens_max": 5}])
def test_answers_do_not_depend_on_company(config: ModelConfig, changes: dict[str, object]) -> None:
    rng = random.Random(1)
    texts = {RequestId(str(seed)): prompt(seed, rng.randint(1, 100)) for seed in range(12)}
    subject = engine(config, **{"blocks": 512, "step_tokens_max": 64, **changes})
    outputs = []
    for name, tokens in texts.items():
        subject.add_request(request(name, tokens))
        outputs += step(subject)
    outputs += finish(subject)
    assert answers(outputs) == {name: answer_alone(tokens, model=config) for name, tokens in texts.items()}


@pytest.mark.parametrize("config", [TINY, SLIDING])
def test_a_prefix_that_is_at_hand_is_not_computed_and_changes_nothing(config: ModelConfig) -> None:
    subject = engine(config, blocks=128)
    tokens = prompt(1, 90)
    for index, (text, cached) in enumerate(
        [(tokens, 0), (tokens, 88), (tokens[:50], 48), (tokens[:48], 40), (tokens[:20] + prompt(2, 60), 16)]
    ):
        subject.add_request(request(str(index), text, 12))
        outputs = finish(subject)
        assert answers(outputs)[RequestId(str(index))] == answer_alone(text, 12, config)
        assert outputs[0].cached_tokens == cached


def test_an_answers_own_blocks_are_found_again() -> None:
    subject, tokens = engine(), prompt(1, 30)
    subject.add_request(request("a", tokens, 20))
    told = answers(finish(subject))[RequestId("a")]
    subject.add_request(request("b", (*tokens, *told, 65), 4))
    outputs = finish(subject)
    assert outputs[0].cached_tokens == 48
    assert answers(outputs)[RequestId("b")] == answer_alone((*tokens, *told, 65), 4)


def test_a_salt_keeps_prefixes_apart() -> None:
    subject, tokens = engine(), prompt(1, 30)
    for index, (salt, cached) in enumerate([("", 0), ("mine", 0), ("mine", 24), ("", 24)]):
        subject.add_request(EngineRequest(RequestId(str(index)), tokens, Sampling(max_tokens=1), cache_salt=salt))
        assert finish(subject)[0].cached_tokens == cached


@pytest.mark.parametrize("config", [TINY, SLIDING])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_no_answer(config: ModelConfig, caching: bool) -> None:
    preempted: list[RequestId] = []

    class Noting(Connector):
        def preempted(self, request: EngineRequest) -> None:
            preempted.append(request.request_id)

    subject = engine(config, Noting(), blocks=25, prefix_caching=caching)
    texts = {RequestId(str(seed)): prompt(seed, 20) for seed in range(6)}
    for name, tokens in texts.items():
        subject.add_request(request(name, tokens, 40))
    told = answers(finish(subject))
    assert preempted
    assert told == {name: answer_alone(tokens, 40, config) for name, tokens in texts.items()}


def test_seeded_sampling_survives_preemption_and_company() -> None:
    def sampled(blocks: int, names: Sequence[str]) -> dict[RequestId, list[int]]:
        subject = engine(blocks=blocks)
        for name in names:
            subject.add_request(request(name, prompt(int(name), 20), 40, temperature=0.8, seed=int(name)))
        return answers(finish(subject))

    together = sampled(20, "12345")
    for name in "12345":
        assert sampled(200, name)[RequestId(name)] == together[RequestId(name)]


def test_an_answer_ends_by_eos_and_says_so() -> None:
    subject = engine(blocks=200)
    for seed in range(8):
        subject.add_request(
            EngineRequest(RequestId(str(seed)), prompt(seed, 10), Sampling(max_tokens=150, min_tokens=3))
        )
    outputs = finish(subject)
    last = {output.request_id: output for output in outputs}
    stopped = [name for name, output in last.items() if output.status is RequestStatus.STOPPED]
    assert stopped
    for name in stopped:
        told = answers(outputs)[name]
        assert told.index(tokenizer.EOS) == len(told) - 1 >= 3
        assert last[name].text == ""


def test_an_answer_ends_at_its_length_with_one_status() -> None:
    subject = engine()
    subject.add_request(request("a", prompt(1, 10), 5))
    outputs = finish(subject)
    assert [output.status for output in outputs] == [None] * 4 + [RequestStatus.LENGTH]
    assert "".join(output.text for output in outputs) == tokenizer.decode([output.token or 0 for output in outputs])


def test_logprobs_come_with_each_token() -> None:
    subject = engine()
    subject.add_request(request("a", prompt(1, 10), 3, logprobs=2))
    for output in finish(subject):
        assert len(output.logprobs) == 3
        assert output.logprobs[0][0] == output.logprobs[1][0] == output.token


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request("a", ()), "at least one"),
        (request("a", prompt(1, 9), 0), "at least 1"),
        (request("a", (65, 264)), "within 0 and 263"),
        (request("a", (65, -1)), "within 0 and 263"),
        (request("a", prompt(1, 9), 5000), "the context is 4096"),
        (request("a", prompt(1, 9), 600), "blocks are required, the cache has 63"),
        (request("taken", prompt(1, 9)), "in use"),
    ],
)
def test_a_request_that_can_never_run_is_rejected_with_the_reason(bad: EngineRequest, why: str) -> None:
    subject = engine()
    subject.add_request(request("taken", prompt(1, 9)))
    with pytest.raises(RejectedError, match=why):
        subject.add_request(bad)
    finish(subject)


def test_a_full_queue_rejects() -> None:
    subject = engine(waiting_max=2)
    for name in "ab":
        subject.add_request(request(name, prompt(1, 9)))
    with pytest.raises(RejectedError, match="try again later"):
        subject.add_request(request("c", prompt(1, 9)))
    finish(subject)


def test_an_idle_engine_can_be_stepped() -> None:
    class Pinning(Connector):
        steps = 0

        def step_begin(self) -> None:
            self.steps += 1

        def has_pending_work(self) -> bool:
            return self.steps < 3

    connector = Pinning()
    subject = engine(connector=connector)
    while subject.has_work():
        assert step(subject) == []
        assert subject.tokens_last_step == 0
    assert connector.steps == 3


def test_prompt_chunks_are_told_layer_by_layer_and_then_whole() -> None:
    told: list[tuple[object, ...]] = []

    class Layers(Connector):
        wants_layers = True

        def layer_done(self, layer: int, chunks: Sequence[Chunk]) -> None:
            told.append(("layer", layer, [(chunk.request.request_id, chunk.start, chunk.end) for chunk in chunks]))

        def chunk_done(self, request: EngineRequest, blocks: BlockIds, computed_tokens: int) -> None:
            assert len(blocks[0]) == -(-computed_tokens // 8)
            told.append(("chunk", request.request_id, computed_tokens))

    subject = engine(connector=Layers(), step_tokens_max=20)
    subject.add_request(request("a", prompt(1, 30), 3))
    finish(subject)
    first, second = [("a", 0, 20)], [("a", 20, 30)]
    assert told == [
        *(("layer", 0, first), ("layer", 1, first), ("chunk", "a", 20)),
        *(("layer", 0, second), ("layer", 1, second), ("chunk", "a", 30)),
    ]


def test_stats_add_up() -> None:
    subject = engine(seqs_max=2)
    for name in "abc":
        subject.add_request(request(name, prompt(1, 9)))
    step(subject)
    stats = subject.stats()
    assert (stats.running, stats.waiting, stats.loading) == (2, 1, 0)
    assert stats.blocks - stats.free_blocks == 4
    finish(subject)


def test_an_engine_lives_in_memory_that_others_can_see() -> None:
    from kvbaton.engines.embedded.embedded_engine import Engine
    from kvbaton.engines.embedded.memory.kv_memory import KvGeometry

    config = engine().config
    geometry = KvGeometry(config.model, config.cache)
    region = bytearray(geometry.region_bytes)
    subject = Engine(config, regions=[memoryview(region)])
    subject.add_request(request("a", prompt(1, 9)))
    finish(subject)
    assert any(region)
    subject.close()


def test_hooks_are_called_in_the_order_that_is_documented() -> None:
    calls: list[str] = []

    class Noting(Connector):
        wants_layers = True

        def __getattribute__(self, name: str) -> object:
            found = object.__getattribute__(self, name)
            if callable(found) and not name.startswith("_"):
                calls.append(name)
            return found

    subject = engine(connector=Noting())
    assert calls == ["bind"]
    calls.clear()
    subject.add_request(request("a", prompt(1, 9), 1))
    finish(subject)
    one_step = [
        *("on_new_request", "step_begin", "take_reports", "match", "allocated"),
        *("layer_done", "layer_done", "chunk_done", "ending", "request_finished"),
    ]
    assert calls == [*one_step, "step_begin", "take_reports"]
