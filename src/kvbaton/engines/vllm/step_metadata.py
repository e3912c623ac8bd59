"""What crosses between the scheduler's and the workers' processes of one engine, by vLLM's own hands.

Law: everything here is small, picklable and made fresh for each step; nothing in it is shared with its maker.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvbaton.engines.side.protocols import Leaving, LoadVerdict


@dataclass(slots=True)
class BatonStep(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, every step."""

    number: int = 0
    verdicts: tuple[LoadVerdict, ...] = ()
    leaving: tuple[Leaving, ...] = ()
    ends_prompts: bool = False  # of a prompt that goes to the store the last chunk is in this step: say when it is done
    is_awaited: bool = False  # requests wait for something else than this step: say when it is done, so that they hear


@dataclass(slots=True)
class StepDone(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: the device is done with this step on every rank that was merged into this."""

    number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return StepDone(min(self.number, other.number)) if isinstance(other, StepDone) else self


@dataclass(slots=True)
class RankCard(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker to its scheduler, once: where its cache lies and how its data planes are reached (msgpack)."""

    facts: bytes
    invitation: bytes

    def __repr__(self) -> str:
        return f"RankCard({len(self.facts)} bytes of facts)"  # the invitation holds a secret
