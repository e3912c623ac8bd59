"""Requests that come to an engine whose workers have not said where its KV cache lies: nothing can be loaded for them.

vLLM asks its workers before it serves; an engine without their word runs, but hands nothing over. Law: a prompt whose
KV was promised is then not computed here in silence where the operator said that a failed load fails its request
(`kv_load_failure_policy`): it gets blocks, as every load does, and one report that it has failed.
"""

from __future__ import annotations

from typing import Any

from kvbaton.engines.side.instructions import NOTHING, LoadVerdict


class BeforeRanks:
    """Of one engine, until its ranks are known."""

    __slots__ = ("_fails", "_verdicts")

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self._verdicts: list[LoadVerdict] = []

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        promised = isinstance(params, dict) and params.get("do_remote_prefill") is True
        missing = request.num_prompt_tokens - local_tokens
        return (missing, True) if self._fails and promised and missing > 0 else NOTHING

    def allocated(self, request: Any, external_tokens: int) -> None:
        if external_tokens > 0:
            self._verdicts.append(LoadVerdict(request.request_id, failed=True))

    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        verdicts, self._verdicts = self._verdicts, []
        return tuple(verdicts)
