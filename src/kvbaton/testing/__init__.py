"""Contracts that any transport or engine can run."""

from kvbaton.testing.transport_case import Case
from kvbaton.testing.transport_contract import check_transport
from kvbaton.testing.transport_harness import InProcessHarness, Log, Pair, Side, TransportHarness

__all__ = ["Case", "InProcessHarness", "Log", "Pair", "Side", "TransportHarness", "check_transport"]
