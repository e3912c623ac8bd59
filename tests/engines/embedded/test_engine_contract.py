"""The embedded engine's adapter keeps the contract that third parties are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvbaton.api.params import Mode, TransferParams
from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Sampling
from kvbaton.engines.embedded.memory.kv_layout import engine_layout
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.ids import RequestId
from kvbaton.testing.engine_contract import EngineCase, EngineRig, check_engine

CONFIG = EngineConfig(cache=CacheConfig(blocks=64, block_tokens=8), prefix_caching=False)
GEOMETRY = KvGeometry(CONFIG.model, CONFIG.cache)
ANSWER_TOKENS = 12


class Embedded:
    """The embedded engine, as the contract asks for one."""

    layout = engine_layout(GEOMETRY)

    def __init__(self, doorway: Doorway) -> None:
        self.doorway = doorway
        self.memory: Sequence[memoryview] = [memoryview(bytearray(GEOMETRY.region_bytes))]
        connector = EmbeddedConnector(doorway, CONFIG)
        self._engine = Engine(CONFIG, connector, list(self.memory))
        self._said: dict[RequestId, list[int]] = {}
        self._finished: dict[RequestId, str] = {}

    def prefill(self, request: RequestId, prompt: Sequence[int]) -> None:
        self._add(request, prompt, TransferParams(do_remote_decode=True, mode=Mode.PULL), 1)

    def decode(self, request: RequestId, prompt: Sequence[int], ticket: str) -> None:
        params = TransferParams(do_remote_prefill=True, mode=Mode.PULL, ticket=ticket) if ticket else None
        self._add(request, prompt, params, ANSWER_TOKENS)

    def abort(self, request: RequestId) -> None:
        self._engine.abort(request)

    def step(self) -> None:
        for output in self._engine.step():
            if output.token is not None:
                self._said.setdefault(output.request_id, []).append(output.token)
            if output.status is not None:
                ticket = (output.handoff or {}).get("ticket")
                self._finished[output.request_id] = str(ticket or self._said.get(output.request_id))

    def finished(self) -> Mapping[RequestId, str]:
        return self._finished

    def free_blocks(self) -> int:
        return self._engine.stats().free_blocks

    def _add(self, request: RequestId, prompt: Sequence[int], params: object, tokens: int) -> None:
        words = tuple((token + 31 * (token // 100)) % 250 for token in prompt)  # tokens of ours are bytes
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        self._engine.add_request(EngineRequest(request, words, sampling, handoff=params))


@pytest.mark.parametrize("case", check_engine.cases, ids=str)
def test_the_embedded_engine_keeps_the_contract(case: EngineCase) -> None:
    case(EngineRig(Embedded))
