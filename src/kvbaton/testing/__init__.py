"""Contract tests that any transport, store backend or engine adapter can run on itself."""

from kvbaton.proof.contracts.engine_contract import EngineCase, check_engine
from kvbaton.proof.contracts.engine_harness import EngineRig
from kvbaton.proof.contracts.store_case import StoreCase
from kvbaton.proof.contracts.store_contract import check_store
from kvbaton.proof.contracts.store_harness import StoreHarness
from kvbaton.proof.contracts.transport_case import Case
from kvbaton.proof.contracts.transport_contract import check_transport
from kvbaton.proof.contracts.transport_harness import InProcessHarness, Log, Pair, Side, TransportHarness

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
