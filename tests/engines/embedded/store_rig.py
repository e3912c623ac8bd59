"""One engine with a store, stepped by the test: a node that only puts, a back end that can be made to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import EngineConfig, FailurePolicy, ModelConfig
from kvbaton.engines.embedded.engine_request import Output
from kvbaton.engines.embedded.memory.kv_layout import engine_layout
from kvbaton.engines.side.store import StoreSide
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.ids import Incarnation, PeerId, RequestId, TransferId, WorkerId
from kvbaton.ranks.engine_store import EngineStore, EngineStoreSettings
from kvbaton.ranks.rank_store import LocalRankStore, rank_values
from kvbaton.store.interface import Backend
from kvbaton.testing.store_harness import FaultyBackend
from kvbaton.testing.transport_harness import poll

from .helpers import TINY, engine

COMPAT = "d" * 32
DEADLINE_S = 40.0
PATIENT = EngineStoreSettings(lookup_timeout_s=30.0, get_timeout_s=30.0, put_timeout_s=30.0)
"""The machine may stand still for seconds, and what is not answered in time is a miss."""
KEY = b"k" * 32


@dataclass
class StoreRig:
    """`turn` is one step of the engine and what a node would do for its puts."""

    engine: Engine
    doorway: Doorway
    shelf: EngineStore
    connector: EmbeddedConnector
    faulty: FaultyBackend
    outputs: list[Output] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)  # those that are not about puts
    ends: list[ev.StoreEnded] = field(default_factory=list)

    def turn(self) -> None:
        for event in self.doorway.take_events():
            if isinstance(event, ev.PutWanted):
                self.shelf.put(event.put, event.blocks, event.keys)
            else:
                self.events.append(event)
        for ended in self.shelf.drain():
            self.ends.append(ended)
            self.doorway.hand_in(fx.UnpinPut(ended.put))
        self.outputs += self.engine.step()
        self.engine.validate(self.pins())

    def pins(self) -> list[int]:
        """Every block that the connector references besides the requests themselves."""
        put = [block for blocks in self.doorway._pins.values() for block in blocks]
        held = [block for blocks in self.doorway._holds.values() for block in blocks]
        return [*put, *held, *(block for blocks in self.storing.holders for block in blocks)]

    @property
    def storing(self) -> StoreSide:
        assert isinstance(self.connector.sides.stored, StoreSide)
        return self.connector.sides.stored

    def stats(self) -> dict[str, int]:
        return self.connector.stats()

    def until(self, condition: Callable[[], bool]) -> None:
        def done() -> bool:
            self.turn()
            return condition()

        assert poll(done, DEADLINE_S), f"not in time: {self.stats()} {self.engine.stats()}"

    def rest(self) -> None:
        """All requests are over and nothing is held; AssertionError when that takes too long."""
        self.until(
            lambda: not self.engine.scheduler.sequences and not self.doorway.put_blocks and not self.storing.busy
        )
        assert self.stats()["store_pins"] == self.shelf.pins == 0
        assert self.engine.pool.free_blocks == self.engine.config.cache.blocks - 1
        doomed = self.connector.sides.decode._doomed
        left = (self.connector._asked, doomed, self.storing._prompts, self.storing._promised)
        assert not any(left), left

    def answer(self, name: str) -> list[int]:
        return [each.token for each in self.outputs if each.request_id == name and each.token is not None]

    def cached(self, name: str) -> int:
        return next(each.cached_tokens for each in self.outputs if each.request_id == name and each.token is not None)

    def reason(self, name: str) -> str:
        return next(each.reason for each in self.outputs if each.request_id == name and each.status is not None)

    def report(self, name: str, end: fx.End) -> None:
        """What the node says of a handoff that got its blocks: its end, and that all is at rest."""
        self.doorway.hand_in(fx.Report(RequestId(name), end))
        self.doorway.hand_in(fx.DropHold(RequestId(name), ""))  # type: ignore[arg-type]

    def close(self) -> None:
        self.faulty.go_on()
        self.shelf.close()


def store_rig(
    backend: Backend,
    *,
    model: ModelConfig = TINY,
    policy: FailurePolicy = "recompute",
    clock: Callable[[], float] | None = None,
    settings: EngineStoreSettings | None = None,
    **changes: object,
) -> StoreRig:
    faulty = FaultyBackend(backend)
    cache = {"blocks": 64, "block_tokens": 8, "tp": 1, **changes}
    config = DoorwayConfig(
        me=PeerId(WorkerId("d0"), Incarnation(1)),
        ranks=int(cache["tp"]),  # type: ignore[call-overload]
        groups=1,
        ticket_keys=(KEY,),
        ticket_ttl_s=60.0,
        mint=lambda: TransferId("0" * 32),
        wall=lambda: 1000.0,
    )
    doorway = Doorway(config, EpochTable(int(cache["blocks"])))  # type: ignore[call-overload]
    plain = engine(model, **cache)  # for its geometry and memory
    geometry = plain.memory.geometry
    regions = [memoryview(bytearray(geometry.region_bytes)) for _ in range(geometry.cache.tp)]
    layout = engine_layout(geometry)
    ranks = [LocalRankStore(faulty, rank_values(layout, rank, COMPAT), [region]) for rank, region in enumerate(regions)]
    shelf = EngineStore(ranks, settings or PATIENT)
    more = {} if clock is None else {"clock": clock}
    engine_config = EngineConfig(model, geometry.cache, on_load_failure=policy, **_engine_part(changes))  # type: ignore[arg-type]
    connector = EmbeddedConnector(doorway, engine_config, shelf=shelf, **more)  # type: ignore[arg-type]
    return StoreRig(Engine(engine_config, connector, regions), doorway, shelf, connector, faulty)


def _engine_part(changes: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in changes.items() if name not in ("blocks", "block_tokens", "tp", "layout")}
