"""Contracts that any transport or engine can run."""

from kvbaton.proof.contracts.transport_case import Case
from kvbaton.proof.contracts.transport_contract import check_transport
from kvbaton.proof.contracts.transport_harness import InProcessHarness, Log, Pair, Side, TransportHarness

__all__ = ["Case", "InProcessHarness", "Log", "Pair", "Side", "TransportHarness", "check_transport"]
