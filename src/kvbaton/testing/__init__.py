"""Contract tests that any transport, store backend or engine adapter can run on itself."""

from kvbaton.testing.engine_contract import EngineCase, EngineRig, check_engine
from kvbaton.testing.store_case import StoreCase
from kvbaton.testing.store_contract import check_store
from kvbaton.testing.store_harness import StoreHarness
from kvbaton.testing.transport_case import Case
from kvbaton.testing.transport_contract import check_transport
from kvbaton.testing.transport_harness import InProcessHarness, Log, Pair, Side, TransportHarness

__all__ = [
    "Case",
    "EngineCase",
    "EngineRig",
    "InProcessHarness",
    "Log",
    "Pair",
    "Side",
    "StoreCase",
    "StoreHarness",
    "TransportHarness",
    "check_engine",
    "check_store",
    "check_transport",
]
