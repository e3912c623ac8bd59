"""Answers that another engine began: vLLM goes on with them, behind tokens that came with the request (decision 0025).

A history is taken when vLLM reads its request, before the scheduler has seen it. vLLM's runner V2 gets all tokens of a
request, and knows where its prompt ends: there the history is output, and limits, penalties, grammars and seeds count
it. Runner V1 would die of that (lab, 2026-11-18): there it is more of the prompt, for sampling that depends on nothing
but the tokens before it. At P it always is, without its last token, whose KV nobody is to have.

Laws: nothing is taken without the router's proof for this very engine. A history is taken whole, or its request ends
with an error of its own (`ProtocolError`, which vLLM's thread of requests turns into one) and computes nothing. D takes
none unless vLLM's front end has said that it repeats the answer from its first token (`repeated_answers`).
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from kvbaton.api.api_errors import ApiError
from kvbaton.api.params import FIELD, History, HistoryWay, TransferParams
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.wire.ticket import check_history

log = logging.getLogger(__name__)

REPEATED = "repeated"
"""Beside a history's tokens: vLLM's front end will tell the answer from its first token."""
_TAKEN = "_kvbaton_history"
"""On a request: how many of its tokens are handed over (D), 0 at P."""
BY_PROMPT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("presence_penalty", (0,)), ("frequency_penalty", (0,)), ("repetition_penalty", (1,)), ("bad_words", ([],)),
    ("structured_outputs", ()), ("thinking_token_budget", ()), ("repetition_detection", ()),
    ("watermarking", (False,)), ("trace_decode_token_ids", ()),
)  # fmt: skip
"""Sampling that looks back at the output, and what turns it off: runner V1 would take the history for the prompt."""
OF_PROMPTS = ("prompt_logprobs", "prompt_logprob_token_ids")


def way_of(vllm_config: Any, *, repeats: bool) -> HistoryWay:
    """How this vLLM goes on with a history. `repeats`: it can tell the answer from its first token."""
    if not repeats:
        return HistoryWay.NONE
    if getattr(vllm_config, "use_v2_model_runner", False):
        return HistoryWay.OUTPUT
    custom = getattr(vllm_config.model_config, "logits_processors", None)  # which may look at the output
    return HistoryWay.NONE if custom else HistoryWay.PROMPT


def asked(raw: Any) -> TransferParams | None:
    """The parameters of a request that brings a history. ProtocolError names the field that is wrong."""
    if not isinstance(raw, dict) or raw.get("history") is None:
        return None
    try:
        return TransferParams.parse(raw)
    except ApiError as error:
        raise ProtocolError(Reason.BAD_MESSAGE, error.message) from None


def is_missing(request: Any) -> bool:
    """Whether a request brought a history that was not taken when it was read."""
    raw = request.kv_transfer_params
    return isinstance(raw, dict) and raw.get("history") is not None and not hasattr(request, _TAKEN)


def handed_tokens(request: Any) -> int:
    """How many of a request's first tokens P was asked for: its prompt, or that and all but the last of its history."""
    return getattr(request, _TAKEN, 0) or int(request.num_prompt_tokens)


def tokens_of(request: Any) -> Sequence[int]:
    """Those tokens; none of a prompt that is embeddings."""
    taken = getattr(request, _TAKEN, 0)
    return request.all_token_ids[:taken] if taken else request.prompt_token_ids or ()


def refusal(params: Any, tokens: Sequence[int], way: HistoryWay) -> str:
    """Why sampling cannot go on behind a history here, "" where it can. `params`: vLLM's SamplingParams."""
    return next(_refusals(params, tokens, way), "")


def _refusals(params: Any, tokens: Sequence[int], way: HistoryWay) -> Iterator[str]:
    if way is HistoryWay.NONE:
        yield "this engine cannot go on with an answer that another began; registered workers say so"
    if any(getattr(params, name, None) is not None for name in OF_PROMPTS):
        yield "log probabilities of the prompt are answered by the engine that began"
    if params.max_tokens is not None and len(tokens) >= params.max_tokens:
        yield f"{len(tokens)} tokens, max_tokens is {params.max_tokens}: nothing is left to generate"
    if _ends(params, tokens):
        yield f"its last token, {tokens[-1]}, ends the answer: nothing is left to generate"
    if way is HistoryWay.PROMPT:
        yield from _looks_back(params)


def _ends(params: Any, tokens: Sequence[int]) -> bool:
    eos = getattr(params, "eos_token_id", None)
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos or eos is None else (eos,))}
    return len(tokens) >= params.min_tokens and tokens[-1] in stops


def _looks_back(params: Any) -> Iterator[str]:
    if params.temperature:
        yield f"temperature {params.temperature}: model runner V1 goes on with greedy sampling alone"
    for name, off in BY_PROMPT:
        value = getattr(params, name, None)
        if not (value is None or value in off or getattr(value, "all_constraints_none", bool)()):
            yield f"{name}: model runner V1 cannot go on with it, since it would take the history for the prompt"


class ContinuedRequests:
    """Of one engine."""

    def __init__(self, door: Doorway, refused: Counter[str], model: Any, way: HistoryWay) -> None:
        """`refused`: counts what was not taken, by reason. `model`: vLLM's configuration of it."""
        self._door = door
        self._refused = refused
        self._way = way
        self._vocabulary = model.get_vocab_size()
        self._tokens_max = model.max_model_len

    def take(self, request: Any, scheduler: Any) -> None:
        """On vLLM's thread of requests: one was read. ProtocolError: it must not go any further."""
        try:
            params = asked(request.kv_transfer_params)
            if params is not None and params.history is not None:
                self._take(request, scheduler, params, params.history)
        except ProtocolError as error:
            self._refused[str(error.reason)] += 1
            log.warning(
                "[history-refused] kvbaton: request %s is not continued: %s", request.request_id, error,
                extra={"request": request.request_id},
            )  # fmt: skip
            raise

    def _take(self, request: Any, scheduler: Any, params: TransferParams, history: History) -> None:
        config, tokens = self._door.config, history.tokens
        check_history(history.proof, tokens, config.me.worker, config.ticket_keys, config.wall())
        self._check(request, tokens)
        if params.do_remote_decode:
            _more_prompt(request, tokens[:-1])
            setattr(request, _TAKEN, 0)
            return
        if request.kv_transfer_params["history"].get(REPEATED) is not True:
            raise _refused("vLLM's front end does not repeat it: is kvbaton's connector loaded in its API server?")
        is_output = bool(getattr(scheduler, "use_v2_model_runner", False))
        way = HistoryWay.OUTPUT if is_output and self._way else self._way
        if doubt := refusal(request.sampling_params, tokens, way):
            raise _refused(doubt)
        if is_output:
            _more_output(request, tokens, scheduler.structured_output_manager)
        else:
            _more_prompt(request, tokens)
            _count_less(request, len(tokens))
        setattr(request, _TAKEN, request.num_tokens - 1)

    def _check(self, request: Any, tokens: Sequence[int]) -> None:
        embedded = request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None) is not None
        if request.sampling_params is None or embedded or getattr(request, "resumable", False):
            raise _refused("only a prompt of tokens, asked once, has an answer that can be continued")
        if max(tokens) >= self._vocabulary:
            raise _refused(f"token {max(tokens)}, this model has {self._vocabulary}")
        if request.num_tokens + len(tokens) >= self._tokens_max:
            raise _refused(f"{request.num_tokens} + {len(tokens)} tokens, this engine serves {self._tokens_max}")


def _refused(detail: str) -> ProtocolError:
    return ProtocolError(Reason.BAD_MESSAGE, f"{FIELD}.history: {detail}")


def _more_prompt(request: Any, tokens: Sequence[int]) -> None:
    request.prompt_token_ids = [*request.prompt_token_ids, *tokens]
    request._all_token_ids.extend(tokens)
    request.num_prompt_tokens += len(tokens)
    request.update_block_hashes()


def _count_less(request: Any, tokens: int) -> None:
    """Limits of the answer, where a part of it is in the prompt. vLLM's front end has parameters of its own."""
    params = copy.copy(request.sampling_params)
    params.max_tokens -= tokens
    params.min_tokens = max(params.min_tokens - tokens, 0)
    request.sampling_params, request.max_tokens = params, params.max_tokens


def _more_output(request: Any, tokens: Sequence[int], grammars: Any) -> None:
    request.append_output_token_ids(list(tokens))
    request.num_preemptions = 1  # as after a preemption: else vLLM asserts that no more than the prompt is cached
    structured = request.structured_output_request
    if structured is not None:
        plain, structured.grammar = vars(structured)["_grammar"], Future()
        _when_ready(plain, lambda ready: _advance(request, tokens, grammars, ready))


def _when_ready(plain: Any, then: Any) -> None:
    if isinstance(plain, Future):
        plain.add_done_callback(then)
    else:
        ready: Future[Any] = Future()
        ready.set_result(plain)
        then(ready)


def _advance(request: Any, tokens: Sequence[int], grammars: Any, compiled: Future[Any]) -> None:
    """A grammar is ready once it has seen the history; one that does not allow it fails its request, as vLLM does."""
    structured = request.structured_output_request
    ready = vars(structured)["_grammar"]
    try:
        twin = copy.copy(request)  # vLLM looks for the grammar at the request, which must not have it yet
        twin.structured_output_request = seen = copy.copy(structured)
        seen.grammar = compiled.result()
        if not grammars.accept_tokens(twin, list(tokens)):
            raise _refused("the request's grammar does not allow it")
        structured.reasoning_ended, structured.reasoner = seen.reasoning_ended, seen.reasoner
        ready.set_result(seen.grammar)
    except Exception as error:  # noqa: BLE001 - vLLM ends the request with whatever is the grammar's result
        ready.set_exception(error)
