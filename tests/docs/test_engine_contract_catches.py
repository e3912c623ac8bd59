"""The contract of engine adapters is tested by breaking what it guards: the case named must catch each of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from docs_examples import example

from kvbaton.testing import EngineRig, check_engine

Toy: Any = example("write-an-engine-adapter.md", "docs_engine_to_break", 1)
CASES = {str(case): case for case in check_engine.cases}


class TellsNothingOfReuse(Toy.ToyEngine):  # type: ignore[misc]
    def __init__(self, doorway: Any) -> None:
        super().__init__(doorway)
        doorway.epochs.raise_epoch = lambda block: None


class PinsNothing(Toy.ToyEngine):  # type: ignore[misc]
    """Leaves what the door returns untouched, and lets nothing go for it."""

    def _touch(self, blocks: Iterable[int]) -> None:
        pass

    def step(self) -> None:
        real = self.doorway.duties
        self.doorway.duties = lambda: [duty for duty in real() if isinstance(duty, Toy.LoadReport)]
        super().step()
        self.doorway.duties = real


class HoldsNothing(Toy.ToyEngine):  # type: ignore[misc]
    """Pins what it leases, but gives blocks back that bytes may still land in."""

    def __init__(self, doorway: Any) -> None:
        super().__init__(doorway)
        allocated, duties = doorway.allocated, doorway.duties
        doorway.allocated = lambda *arguments: allocated(*arguments) and ()
        doorway.duties = lambda: [duty for duty in duties() if not isinstance(duty, Toy.DropBlocks)]


class ReleasesNothing(Toy.ToyEngine):  # type: ignore[misc]
    def _release(self, blocks: Iterable[int]) -> None:
        pass


class TakesAnyReportForGood(Toy.ToyEngine):  # type: ignore[misc]
    def _loaded(self, one: Any, is_good: bool) -> None:
        super()._loaded(one, True)


class ForgetsAbortedLoads(Toy.ToyEngine):  # type: ignore[misc]
    def abort(self, request: Any) -> None:
        one = self._requests.get(request)
        if one is not None:
            self._forget(one)


class ComputesEverythingItself(Toy.ToyEngine):  # type: ignore[misc]
    def decode(self, request: Any, prompt: Any, ticket: str) -> None:
        super().decode(request, prompt, "")


class AnswersWithoutLooking(Toy.ToyEngine):  # type: ignore[misc]
    def _kv(self, one: Any) -> bytes:
        return b""


class BindsNothingToThePrompt(Toy.ToyEngine):  # type: ignore[misc]
    def decode(self, request: Any, prompt: Any, ticket: str) -> None:
        one = self._requests[request] = Toy.Request(request, tuple(prompt), ticket)
        if ticket:
            try:
                of = self.doorway.open_ticket(ticket).digest
            except Exception:  # noqa: BLE001 - a planted fault
                of = one.digest
            self.doorway.want(request, ticket, of, len(prompt))


CAUGHT: list[tuple[Callable[..., Any], str]] = [
    (TellsNothingOfReuse, "a_late_read_of_reused_blocks_never_counts"),
    (PinsNothing, "a_prompt_that_nobody_reads_is_kept_for_its_lease_and_no_longer"),
    (HoldsNothing, "bytes_that_land_late_meet_no_other_request"),
    (ReleasesNothing, "the_answer_is_that_of_one_engine"),
    (TakesAnyReportForGood, "the_death_of_p_costs_a_prefill_and_no_more"),
    (ForgetsAbortedLoads, "a_request_that_is_aborted_after_any_step_leaves_nothing"),
    (ComputesEverythingItself, "the_answer_is_that_of_one_engine"),
    (AnswersWithoutLooking, "answers_differ_where_the_kv_does"),
    (BindsNothingToThePrompt, "a_ticket_that_leads_nowhere_costs_a_prefill_and_no_more"),
]


@pytest.mark.parametrize(("careless", "name"), CAUGHT, ids=[f"{one.__name__}-{name}" for one, name in CAUGHT])
def test_a_careless_adapter_is_caught(careless: Callable[..., Any], name: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        CASES[name](EngineRig(careless))
