"""What the connector has in the scheduler's process once the engine has its cache: P's and D's halves, and what waits.

Law: only the scheduler's thread is here.
"""

from __future__ import annotations

from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.engines.vllm.decode import Decode
from kvbaton.engines.vllm.no_store import NoStore
from kvbaton.engines.vllm.pin_admission import PinAdmission
from kvbaton.engines.vllm.prefill import Prefill
from kvbaton.engines.vllm.step_metadata import LoadVerdict
from kvbaton.engines.vllm.transfer_params import Ask, ForeignLookup
from kvbaton.engines.vllm.vllm_turns import VllmTurns
from kvbaton.engines.vllm.waiting import Waiting, status_aside
from kvbaton.node.doorway import Doorway


class ConnectorParts:
    """Of one engine."""

    __slots__ = (
        "arrived", "decode", "door", "failures", "held", "lookup", "pins", "pool", "prefill", "stored", "turns",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        door: Doorway,
        pool: PinnedPool,
        prefill: Prefill,
        decode: Decode,
        lookup: ForeignLookup,
        stored: NoStore,
        turns: VllmTurns,
    ) -> None:
        self.door = door
        self.pool = pool
        self.prefill = prefill
        self.decode = decode
        self.lookup = lookup
        self.stored = stored
        self.turns = turns
        self.held: dict[str, Ask | None] = {}  # requests that came, by what they ask, until their content is known
        self.pins = pins = PinAdmission(prefill, door.budget, on_refused=turns.refused)
        self.waiting = Waiting(lambda each: decode.blocked(each) or pins.blocked(each), status_aside())
        self.arrived: list[str] = []  # loads of which vLLM is to be told
        self.failures: list[LoadVerdict] = []  # and those of which the workers are

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for something that only we can tell it."""
        return bool(self.arrived or self.waiting or self.decode.busy or self.stored.busy)

    def voided(self) -> None:
        """Weights were replaced: nothing that was loaded, and that vLLM has not been told of, is delivered."""
        self.sort()
        self.decode.voided()
        self.failures += [LoadVerdict(request_id) for request_id in self.arrived]
        self.failures[:] = [LoadVerdict(verdict.request_id, failed=True) for verdict in self.failures]
        self.arrived.clear()

    def sort(self) -> None:
        """Verdicts that have come since: what has arrived, and what has failed."""
        for verdict in self.decode.take_verdicts() + self.stored.take_verdicts():
            if verdict.is_good:
                self.arrived.append(verdict.request_id)
            else:
                self.failures.append(verdict)
