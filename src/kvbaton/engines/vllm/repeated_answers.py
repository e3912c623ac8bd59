"""vLLM's front end, where an answer goes on behind a history: it is told from the history's first token.

Text, stop strings, tool calls, reasoning and usage are made of tokens in vLLM's API server. It is given the history in
front of the first token that the engine generates, so that all of these stand as they would in the unbroken run. A
history's log probabilities are placeholders: the router, which has the true ones, leaves them out.

Laws: no secret is here, and nothing is decided: an engine that does not believe a history generates nothing, and then
nothing is repeated. The engine is told that it will be (`REPEATED`) as the last thing. A history comes in pieces, each
an event of the stream, so that no event grows with it. vLLM's metrics count what was generated here. Requests without a
history cost one look into an empty dict a step. An answer that cannot be repeated ends with an error.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.engines.side.guard import guarded, note, returns
from kvbaton.engines.vllm import continued_requests
from kvbaton.engines.vllm.continued_requests import REPEATED
from kvbaton.protocol.errors import ProtocolError

PIECE_TOKENS = 32
_OUTPUTS = "vllm.v1.engine.output_processor"
_INPUTS = "vllm.v1.engine.input_processor"
_MARK = "_kvbaton_repeats"
_HISTORIES = "_kvbaton_histories"
Plain = Callable[..., Any]


@guarded(returns(False))
def install() -> bool:
    """Once a process; whether answers are repeated in it, and so in each process of this engine."""
    try:
        outputs, inputs = importlib.import_module(_OUTPUTS), importlib.import_module(_INPUTS)
        processor, checker = outputs.OutputProcessor, inputs.InputProcessor
    except (ImportError, AttributeError):
        return False  # a vLLM that looks different: its workers register that they continue nothing
    if not getattr(processor, _MARK, False):
        apart = _apart(outputs.RequestOutputCollector)
        processor.add_request = _adds(processor.add_request, apart)
        processor.process_outputs = _processes(processor.process_outputs)
        bad_request = getattr(inputs, "VLLMValidationError", ValueError)
        checker.process_inputs = _checks(checker.process_inputs, bad_request)
        setattr(processor, _MARK, True)
    return True


def _checks(plain: Plain, bad_request: type[Exception]) -> Plain:
    """What this engine is known not to continue is refused before anything else, in words that reach the client."""

    @functools.wraps(plain)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            doubt = _doubt(params, self.vllm_config)
        except ProtocolError as error:
            doubt = error.detail
        if doubt:
            raise bad_request(doubt)
        return plain(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def _doubt(params: Any, vllm_config: Any) -> str:
    told = continued_requests.asked(_transfer(params))
    if told is None or told.history is None or told.do_remote_decode:
        return ""
    way = continued_requests.way_of(vllm_config, repeats=True)
    doubt = continued_requests.refusal(params, told.history.tokens, way)
    return f"kv_transfer_params.history: {doubt}" if doubt else ""


def _transfer(params: Any) -> Any:
    return (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")


def _adds(plain: Plain, apart: type) -> Plain:
    @functools.wraps(plain)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, request, *args, **kwargs)
        raw = _transfer(request.sampling_params)
        if isinstance(raw, dict) and raw.get("history") is not None:
            _begun(self, request, raw, apart)
        return found

    return add_request


@guarded(returns(None))
def _begun(processor: Any, request: Any, raw: dict[str, Any], apart: type) -> None:
    told = continued_requests.asked(raw)
    if told is None or told.history is None or told.do_remote_decode:
        return
    histories = vars(processor).setdefault(_HISTORIES, {})
    for gone in histories.keys() - processor.request_states.keys():
        del histories[gone]
    state = processor.request_states[request.request_id]
    if state.queue is not None and not isinstance(state.queue, apart):
        state.queue.__class__, state.queue.backlog = apart, deque()
    histories[request.request_id] = told.history.tokens
    raw["history"][REPEATED] = True


def _processes(plain: Plain) -> Plain:
    @functools.wraps(plain)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        histories = vars(self).get(_HISTORIES)
        if not histories:
            return plain(self, engine_core_outputs, *args, **kwargs)
        earlier = [_repeat(self, plain, each, histories) for each in engine_core_outputs]
        found = plain(self, engine_core_outputs, *args, **kwargs)
        for each in filter(None, earlier):
            found.request_outputs[:0] = each.request_outputs
            found.reqs_to_abort.extend(each.reqs_to_abort)
        return found

    return process_outputs


def _repeat(processor: Any, plain: Plain, output: Any, histories: dict[str, Sequence[int]]) -> Any:
    state = processor.request_states.get(output.request_id)
    tokens = histories.pop(output.request_id, None) if output.new_token_ids else None
    if state is None or tokens is None:
        return None
    try:
        return _tell(processor, plain, state, output, tokens)
    except Exception as error:  # noqa: BLE001 - the next step would end all requests of the engine
        note("repeat_history", error)
        output.new_token_ids, output.new_logprobs = [], None
        output.finish_reason = importlib.import_module("vllm.v1.engine").FinishReason.ERROR
        return None


def _tell(processor: Any, plain: Plain, state: Any, output: Any, tokens: Sequence[int]) -> Any:
    """Without vLLM's statistics, which would take pieces for tokens that were generated, in no time."""
    if output.prefill_stats is not None:
        state.num_cached_tokens = min(output.prefill_stats.num_cached_tokens, state.prompt_len)
    pieces = [tokens[at : at + PIECE_TOKENS] for at in range(0, len(tokens), PIECE_TOKENS)]
    told = [_piece(output, each) for each in pieces]
    queue = state.queue
    if queue is not None:
        queue.in_pieces = True
    found = plain(processor, told)
    if queue is not None:
        queue.in_pieces = False
    state.is_prefilling = True  # the first token that was generated here is still to come
    return found


def _piece(output: Any, tokens: Sequence[int]) -> Any:
    rows = output.new_logprobs
    return type(output)(output.request_id, list(tokens), None if rows is None else _placeholders(rows, tokens))


def _placeholders(rows: Any, tokens: Sequence[int]) -> Any:
    """As probable as can be, and the first of their rank: a number that every client can read."""
    import numpy as np

    ids = np.array(tokens, dtype=rows.logprob_token_ids.dtype)[:, None]
    ranks = np.ones(len(tokens), dtype=rows.sampled_token_ranks.dtype)
    return type(rows)(ids, np.zeros(ids.shape, dtype=rows.logprobs.dtype), ranks, None)


def _apart(collector: type) -> type:
    """vLLM joins what a slow client has not taken yet to one event: pieces of a history stay what they are."""

    class PieceByPiece(collector):  # type: ignore[misc]
        backlog: deque[Any]
        in_pieces: bool = False
        joins: bool = False

        def put(self, output: Any) -> None:
            if self.output is None or isinstance(output, Exception):
                super().put(output)
            elif self.backlog and self.joins and not self.in_pieces:
                self.backlog[-1].add(output, aggregate=self.aggregate)
            else:
                self.backlog.append(output)
                self.joins = not self.in_pieces

        async def get(self) -> Any:
            return self._then(await super().get())

        def get_nowait(self) -> Any:
            return self._then(super().get_nowait())

        def _then(self, output: Any) -> Any:
            if self.output is None and self.backlog:
                super().put(self.backlog.popleft())
            return output

    return PieceByPiece
