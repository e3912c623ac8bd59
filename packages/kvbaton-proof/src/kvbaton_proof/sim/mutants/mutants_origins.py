"""Wrong ideas about KV of members that are gone."""

from __future__ import annotations

from typing import Any

from kvbaton.protocol.machines.consumer import Consumer
from kvbaton.protocol.machines.context import Origins
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.ranks import store_trust
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _own_source_alone(original: Any) -> Any:
    def note(self: Any, names: Any) -> None:
        original(self, list(names)[:1])

    return note


def _untold(original: Any) -> Any:
    return property(lambda self: ())


def _no_question(original: Any) -> Any:
    def note_origins(self: Any, link: Any, granted: Any) -> None:
        identity, is_gone = self.desk.identity, self.desk.identity.is_gone
        identity.is_gone = lambda origin: False
        original(self, link, granted)
        identity.is_gone = is_gone

    return note_origins


def _replaced_means_forgotten(original: Any) -> Any:
    def on_cache_replaced(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        self.desk.origins.forgotten()

    return on_cache_replaced


def _all_asked_for(original: Any) -> Any:
    return lambda self, now, granted_only=False: original(self, now)


def _unheard(original: Any) -> Any:
    return lambda self, event, now: None


def _kept_for_ever(original: Any) -> Any:
    def forgotten(self: Any) -> None:
        self._forgetting = False

    return forgotten


def _reports_are_of_today(original: Any) -> Any:
    return lambda self, named, keyring: False


def _writers_unheard(original: Any) -> Any:
    def taken_from(keyring: Any, writers: Any) -> list[str]:
        return []

    return taken_from


ORIGIN_MUTANTS: tuple[Mutant, ...] = (
    Mutant("origins_of_the_source_alone", "36", "D notes its P, and not from whom that P had taken",
           swap(Origins, "note", _own_source_alone)),
    Mutant("grants_without_origins", "36", "a grant does not name the members from whom its source took",
           swap(Origins, "names", _untold)),
    Mutant("gone_and_taken", "36", "D takes KV of a member that was removed",
           swap(Consumer, "_note_origins", _no_question)),
    Mutant("replaced_means_forgotten", "36", "a cache whose blocks may still be found has no origins any more",
           swap(Ledger, "_on_cache_replaced", _replaced_means_forgotten)),
    Mutant("removal_unheard", "36", "an engine goes on to use the KV of a member that was removed",
           swap(Ledger, "_on_members_gone", _unheard)),
    Mutant("forgotten_and_still_named", "36", "whose KV was forgotten is an origin for ever, so nobody takes any more",
           swap(Origins, "forgotten", _kept_for_ever)),
    Mutant("forgetting_ends_what_was_asked_for", "36", "found here: the first handoff to an engine that slept is lost",
           swap(Consumer, "void", _all_asked_for)),
    Mutant("store_values_of_nobody", "36", "what came from the store has no origins",
           swap(store_trust.__dict__, "taken_from", _writers_unheard)),
    Mutant("writer_gone_since_the_check", "36", "a rank reports a value after its writer was removed",
           swap(store_trust._Writers, "have_gone", _reports_are_of_today)),
)  # fmt: skip
