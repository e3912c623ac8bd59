"""Wrong ideas about who answers whom, and when: other messages compensate, so that every handoff still ends well.

What they cost is time and words; `dialogue.py` hears them.
"""

from __future__ import annotations

from typing import Any

from kvbaton.protocol.machines import consumer_filling, inbound, producer, push_writer
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _nothing(original: Any) -> Any:
    return lambda *_: None


def _slowly(original: Any) -> Any:
    def pulse(self: Any, intake: Any, seconds: float, now: float) -> None:
        original(self, intake, seconds * 2, now)

    return pulse


def _hastily(original: Any) -> Any:
    def pulse(self: Any, intake: Any, seconds: float, now: float) -> None:
        original(self, intake, seconds / 2, now)

    return pulse


def _once(original: Any) -> Any:
    def on_commit(self: Any, session: Any, message: Any, now: float) -> None:
        lease = self.leases.get(message.lease)
        if lease is not None:
            original(self, session, message, now)

    return on_commit


def _mute_when_revoked(original: Any) -> Any:
    def on_revoke(self: Any, session: Any, message: Any, now: float) -> None:
        if (session.number, message.reservation) in self.outlets:
            original(self, session, message, now)

    return on_revoke


DIALOGUE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("accepted_unheard", "13", "D repeats an offer that was accepted",
           swap(consumer_filling.Pushes, "on_accepted", _nothing)),
    Mutant("renewal_unanswered", "9", "P does not say for how long it renewed a lease",
           swap(producer.Producer, "on_renew", _nothing)),
    Mutant("ready_untold", "10", "a reader hears what is ready when it asks, and not when it is",
           swap(producer.Producer, "_tell_ready", _nothing)),
    Mutant("asks_again_late", "9", "what was lost is asked for again after twice the time",
           swap(inbound.ConsumerBook, "pulse", _slowly)),
    Mutant("asks_again_soon", "9", "what is on its way is asked for again after half the time",
           swap(inbound.ConsumerBook, "pulse", _hastily)),
    Mutant("commit_answered_once", "6", "who asks again whether its copy was good hears nothing",
           swap(producer.Producer, "on_commit", _once)),
    Mutant("mute_when_revoked", "13", "a Revoke of what was never written is not answered: D fences",
           swap(push_writer.Writer, "on_revoke", _mute_when_revoked)),
)  # fmt: skip
