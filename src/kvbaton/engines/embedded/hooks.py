"""The interface between an engine and its KV connector: the scheduler-side hooks of vLLM's `KVConnectorBase_V1`, typed.

All are called on the engine's thread, in this order within a step (a star: any number of times):
`step_begin`, `take_reports`, (`match`, `allocated` | `preempted`)*, `layer_done`*, `chunk_done`*, `block_done`*,
(`ending`, `request_finished`)*.
`on_new_request` comes from `add_request`, `request_finished` also from `abort`. None may block. One that raises kills
the engine, as it does in vLLM; so does a report that is not due (`AssertionError`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.engines.embedded.engine_request import EngineRequest, RequestStatus
from kvbaton.engines.embedded.memory.block_cache import BlockPool
from kvbaton.protocol.ids import RequestId

BlockIds = tuple[tuple[int, ...], ...]
"""Per KV group the blocks of a request, in the order of its tokens; 0 where a sliding window has moved on."""


class NotYet(msgspec.Struct, frozen=True):
    """Ask again in the next step; requests behind this one continue."""


class Nothing(msgspec.Struct, frozen=True):
    """Compute it here."""


class LoadOrder(msgspec.Struct, frozen=True):
    """`tokens` more, after the local ones, will be written into the request's blocks; one `LoadOutcome` follows."""

    tokens: int


class NoRoom(msgspec.Struct, frozen=True):
    """The request is refused: it ends at once, and `request_finished` follows."""

    reason: str


Match = NotYet | Nothing | LoadOrder | NoRoom


class LoadOutcome(msgspec.Struct, frozen=True):
    """The one end of a load. After it no byte lands in a block that the connector does not hold itself (`touch`).

    On failure the engine's policy decides: `recompute` gives the blocks back (the good prefix may be found again in the
    prefix cache) and asks `match` anew, which must not offer the same load for ever; `fail` ends the request with
    `reason`. A report that is not `final` is treated as `recompute` by either: the connector has more to offer, or what
    it could not load was no promise.
    """

    request_id: RequestId
    ok: bool
    good_prefix_tokens: int | None = None  # where not ok: this many tokens are right, and all parts are at rest
    reason: str = ""
    final: bool = True


class Chunk(msgspec.Struct, frozen=True):
    """Given tokens (prompt and history) `start` to `end` of a request, computed in this step."""

    request: EngineRequest
    blocks: BlockIds
    start: int
    end: int


class Connector:
    """Moves KV in and out of an engine; this one, a stand-alone engine's, moves none. A base for those that do."""

    wants_layers: bool = False
    """Whether `layer_done` is to be called; it costs a call per layer and step."""

    def bind(self, pool: BlockPool) -> None:
        """The engine's pool, once, before anything else: `touch`, `unpin`, `epoch`, `watch`. For hooks' use only."""

    def on_new_request(self, request: EngineRequest) -> None:
        """The engine has accepted a request; it may be long until it is scheduled."""

    def match(self, request: EngineRequest, local_tokens: int) -> Match:
        """Can KV after the first `local_tokens` (whole blocks) be loaded? An answer may be discarded."""
        return Nothing()

    def allocated(self, request: EngineRequest, blocks: BlockIds, external_tokens: int) -> None:
        """A request got its blocks. `external_tokens` > 0: load them, after the local ones `match` was asked with.

        0: it starts to run. A request that is loaded gets both calls, one after the other.
        """

    def step_begin(self) -> None:
        """Every step, first, also when nothing runs: the place to drain queued pins and releases."""

    def layer_done(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """The KV of this step's prompt chunks is written in one layer."""

    def chunk_done(self, request: EngineRequest, blocks: BlockIds, computed_tokens: int) -> None:
        """The first `computed_tokens` of the prompt have their KV in `blocks`, in all layers."""

    def block_done(self, request: EngineRequest, blocks: BlockIds, tokens: Sequence[int]) -> None:
        """A block of the answer is whole: these tokens of prompt and answer have their KV in `blocks`."""

    def preempted(self, request: EngineRequest) -> None:
        """The request is about to lose its blocks and will be recomputed; `match` will be called again."""

    def ending(self, request: EngineRequest, tokens: Sequence[int]) -> None:
        """Directly before `request_finished`: prompt and answer. All but the last have their KV, if it ends well."""

    def request_finished(
        self, request: EngineRequest, blocks: BlockIds, status: RequestStatus
    ) -> Mapping[str, object] | None:
        """Once per accepted request, before its blocks are freed: `touch` those to keep. The client gets the result."""
        return None

    def take_reports(self) -> Sequence[LoadOutcome]:
        """Loads that have ended: exactly one report per `LoadOrder` that got its blocks, also after an abort."""
        return ()

    def has_pending_work(self) -> bool:
        """True keeps the engine's loop stepping, though it has no requests."""
        return False
