"""What vLLM is asked to continue: which sampling, on whose word, and what its request is after that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.api.params import HistoryWay
from kvbaton.engines.vllm import continued_requests
from kvbaton.engines.vllm.continued_requests import ContinuedRequests, refusal, way_of
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import seal_history

KEY, ME, NOW, EOS = b"k" * 32, WorkerId("d0"), 1000.0, 2
PROMPT, SAID = [10, 11, 12], [20, 21, 22]


def sampling(**more: Any) -> SimpleNamespace:
    plain = {"temperature": 0.0, "max_tokens": 16, "min_tokens": 0, "stop_token_ids": [], "ignore_eos": False}
    return SimpleNamespace(**{**plain, "eos_token_id": EOS, **more})


@dataclass
class FakeRequest:
    """As much of vLLM's request as is read and changed."""

    kv_transfer_params: Any
    sampling_params: Any = field(default_factory=sampling)
    prompt_token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    request_id: str = "r"
    structured_output_request: Any = None
    num_preemptions: int = 0
    hashed: int = 0

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_tokens = self.sampling_params.max_tokens

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def update_block_hashes(self) -> None:
        self.hashed = self.num_tokens

    def append_output_token_ids(self, tokens: list[int]) -> None:
        self.output_token_ids += tokens
        self._all_token_ids += tokens
        self.update_block_hashes()


class Grammars:
    """vLLM's structured output manager: allows what it was told to."""

    def __init__(self, *, allows: bool = True) -> None:
        self.allows = allows
        self.seen: list[tuple[object, list[int]]] = []

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        self.seen.append((request.structured_output_request.grammar, tokens))
        return self.allows


class Structured:
    """vLLM's StructuredOutputRequest: its grammar is None until it is compiled."""

    def __init__(self) -> None:
        self._grammar: Any = Future()
        self.reasoning_ended, self.reasoner = False, None

    @property
    def grammar(self) -> Any:
        return self._grammar if not isinstance(self._grammar, Future) else None

    @grammar.setter
    def grammar(self, told: Any) -> None:
        self._grammar = told


def history(tokens: list[int] = SAID, target: WorkerId = ME, **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "proof": seal_history(tokens, target, NOW + 60, KEY), "repeated": True, **more}


def engine(way: HistoryWay = HistoryWay.OUTPUT) -> tuple[ContinuedRequests, Counter[str]]:
    config = SimpleNamespace(me=SimpleNamespace(worker=ME), ticket_keys=(KEY,), wall=lambda: NOW)
    model = SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=64)
    refused: Counter[str] = Counter()
    return ContinuedRequests(SimpleNamespace(config=config), refused, model, way), refused  # type: ignore[arg-type]


def scheduler(*, v2: bool, grammars: Any = None) -> SimpleNamespace:
    return SimpleNamespace(use_v2_model_runner=v2, structured_output_manager=grammars)


def test_with_runner_v2_a_history_is_output_as_after_a_preemption() -> None:
    request = FakeRequest({"history": history()})
    engine()[0].take(request, scheduler(v2=True))
    assert (request.prompt_token_ids, request.output_token_ids) == (PROMPT, SAID)
    assert (request.num_preemptions, request.hashed, request.max_tokens) == (1, 6, 16)
    assert continued_requests.handed_tokens(request) == 5
    assert continued_requests.tokens_of(request) == [*PROMPT, 20, 21]


def test_with_runner_v1_a_history_is_prompt_and_limits_are_what_is_left_of_them() -> None:
    request = FakeRequest({"history": history()}, sampling(min_tokens=5))
    clients_own = request.sampling_params
    engine(HistoryWay.PROMPT)[0].take(request, scheduler(v2=False))
    assert request.prompt_token_ids == request.all_token_ids == [*PROMPT, *SAID]
    assert (request.num_prompt_tokens, request.max_tokens, request.sampling_params.min_tokens) == (6, 13, 2)
    assert (clients_own.max_tokens, clients_own.min_tokens) == (16, 5)
    assert continued_requests.handed_tokens(request) == 5


def test_p_computes_the_prompt_and_all_of_the_history_but_its_last_token() -> None:
    request = FakeRequest({"do_remote_decode": True, "history": history()}, sampling(max_tokens=1, temperature=1.0))
    engine(HistoryWay.PROMPT)[0].take(request, scheduler(v2=False))
    assert request.prompt_token_ids == [*PROMPT, 20, 21]
    assert (request.num_prompt_tokens, request.max_tokens) == (5, 1)
    assert continued_requests.handed_tokens(request) == 5


def test_a_request_without_a_history_is_left_alone() -> None:
    request = FakeRequest({"do_remote_prefill": True, "ticket": "t"})
    engine(HistoryWay.NONE)[0].take(request, scheduler(v2=True))
    assert request.all_token_ids == PROMPT
    assert continued_requests.handed_tokens(request) == 3


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (history(target=WorkerId("d1")), Reason.TICKET_FORGED),
        ({**history(), "tokens": [1, 2]}, Reason.TICKET_FORGED),
        ({"tokens": SAID, "proof": seal_history(SAID, ME, NOW - 1, KEY), "repeated": True}, Reason.TICKET_EXPIRED),
        (history(repeated=False), Reason.BAD_MESSAGE),
        (history([100]), Reason.BAD_MESSAGE),
        (history([20] * 61), Reason.BAD_MESSAGE),
        (history([20, EOS]), Reason.BAD_MESSAGE),
        (history([20] * 16), Reason.BAD_MESSAGE),
        ("text", Reason.BAD_MESSAGE),
    ],
)
def test_what_is_not_taken_ends_its_request_and_is_counted(told: Any, reason: Reason) -> None:
    found, refused = engine()
    request = FakeRequest({"history": told})
    with pytest.raises(ProtocolError) as raised:
        found.take(request, scheduler(v2=True))
    assert raised.value.reason is reason
    assert refused == {str(reason): 1}
    assert request.all_token_ids == PROMPT
    assert continued_requests.is_missing(request)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.2}, {"bad_words": ["no"]},
        {"structured_outputs": object()}, {"thinking_token_budget": 5}, {"watermarking": True},
    ],
)  # fmt: skip
def test_runner_v1_does_not_continue_what_looks_back_at_the_output(more: dict[str, Any]) -> None:
    assert next(iter(more)) in refusal(sampling(**more), SAID, HistoryWay.PROMPT)
    assert refusal(sampling(**more), SAID, HistoryWay.OUTPUT) == ""


def test_what_is_off_is_no_reason_to_refuse() -> None:
    none = SimpleNamespace(all_constraints_none=lambda: True)
    off = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "bad_words": [], "structured_outputs": none}
    assert refusal(sampling(**off, watermarking=False), SAID, HistoryWay.PROMPT) == ""


def test_an_end_that_does_not_count_yet_or_at_all_is_no_end() -> None:
    ended = [20, EOS]
    assert "ends the answer" in refusal(sampling(), ended, HistoryWay.OUTPUT)
    assert refusal(sampling(ignore_eos=True), ended, HistoryWay.OUTPUT) == ""
    assert refusal(sampling(min_tokens=3), ended, HistoryWay.OUTPUT) == ""
    assert "ends the answer" in refusal(sampling(stop_token_ids=[22]), SAID, HistoryWay.OUTPUT)


def test_the_way_is_that_of_the_model_runner_and_of_the_front_end() -> None:
    def config(*, v2: bool, custom: Any = None) -> Any:
        return SimpleNamespace(use_v2_model_runner=v2, model_config=SimpleNamespace(logits_processors=custom))

    assert way_of(config(v2=True), repeats=True) is HistoryWay.OUTPUT
    assert way_of(config(v2=False), repeats=True) is HistoryWay.PROMPT
    assert way_of(config(v2=False, custom=["mine"]), repeats=True) is HistoryWay.NONE
    assert way_of(config(v2=True), repeats=False) is HistoryWay.NONE


def test_a_grammar_is_ready_once_it_has_seen_the_history() -> None:
    request, grammars, structured = FakeRequest({"history": history()}), Grammars(), Structured()
    request.structured_output_request, compiling = structured, structured._grammar
    engine()[0].take(request, scheduler(v2=True, grammars=grammars))
    assert not structured._grammar.done()
    compiling.set_result("the grammar")
    assert structured._grammar.result() == "the grammar"
    assert grammars.seen == [("the grammar", SAID)]


@pytest.mark.parametrize("how", ["not allowed", "not compiled"])
def test_a_grammar_that_cannot_go_on_fails_its_request(how: str) -> None:
    request, structured = FakeRequest({"history": history()}), Structured()
    request.structured_output_request, compiling = structured, structured._grammar
    engine()[0].take(request, scheduler(v2=True, grammars=Grammars(allows=how != "not allowed")))
    if how == "not compiled":
        compiling.set_exception(ValueError("no grammar"))
    else:
        compiling.set_result("the grammar")
    with pytest.raises((ProtocolError, ValueError)):
        structured._grammar.result()
