"""Wrong ideas that break no answer by themselves and that one checker alone sees: limits, bounds, planes, versions."""

from __future__ import annotations

from typing import Any

from kvbaton.protocol import consumer, links, producer, sessions
from kvbaton.protocol.effects import UnpinPut
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.messages import Commit, Written
from kvbaton.protocol.puts import Puts
from kvbaton.protocol.shunned import Shunned
from kvbaton.runtime import node
from kvbaton.runtime.doorway import Doorway
from kvbaton.sim.mutation import Mutant, swap

FOR_EVER_S = 1e6


def _oldest_in_common(original: Any) -> Any:
    def settle(ours: Any, greeted_in: int, bits: int) -> Any:
        newest = original(ours, greeted_in, bits)
        return max(ours.oldest, greeted_in) if greeted_in in ours else newest

    return settle


def _last_word_in_the_oldest(original: Any) -> Any:
    def encode(sender: Any, to: Any, session: int, message: Any, version: int) -> Any:
        return original(sender, to, session, message, 1 if isinstance(message, Commit | Written) else version)

    return encode


def _for_ever(original: Any) -> Any:
    return lambda self, worker, transport, now: original(self, worker, transport, now + FOR_EVER_S)


def _nothing(original: Any) -> Any:
    return lambda *arguments: None


def _none_counted(original: Any) -> Any:
    return property(lambda self: 0)


def _unpinned_when_asked(original: Any) -> Any:
    def on_wanted(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        self.desk.emit(UnpinPut(event.put))

    return on_wanted


def _patient(original: Any) -> Any:
    def on_wanted(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.put in self.states:
            self.desk.timers.set(("put", event.put), now + 3 * self.desk.settings.transfer_timeout)

    return on_wanted


def _held_anew(original: Any) -> Any:
    def extend(self: Any, lease: Any, now: float) -> Any:
        lease.hold_until = now + self.desk.settings.max_hold_s
        return original(self, lease, now)

    return extend


def _no_hard_deadline(original: Any) -> Any:
    def wait(self: Any, intake: Any, seconds: float, now: float) -> None:
        intake.hard_deadline = 0.0
        original(self, intake, seconds, now)

    return wait


def _any_reason(original: Any) -> Any:
    return lambda text: Reason.OTHER


def _said_twice(original: Any) -> Any:
    def completed(self: Any, lease: Any) -> None:
        original(self, lease)
        original(self, lease)

    return completed


CHECKER_MUTANTS: tuple[Mutant, ...] = (
    Mutant("settled_for_the_oldest", "24", "a pair of new nodes talks in the oldest version that both speak",
           swap(sessions.__dict__, "settle", _oldest_in_common)),
    Mutant("last_word_in_the_oldest", "24", "a word that all versions share is said in the oldest",
           swap(node.__dict__, "encode", _last_word_in_the_oldest)),
    Mutant("plane_shunned_for_ever", "23", "a plane that failed once is never tried again",
           swap(Shunned, "add", _for_ever)),
    Mutant("passed_over_unseen", "23", "found here: what the source gave up is never tried again by its target",
           swap(links.Links, "_shun_passed_over", _nothing)),
    Mutant("quarantine_without_bound", "18", "D takes in more while it has no room for what is not at rest",
           swap(consumer.Consumer, "quarantined_blocks", _none_counted)),
    Mutant("restless_without_bound", "18", "P writes more while it has no room for what is not at rest",
           swap(producer.Producer, "restless_blocks", _none_counted)),
    Mutant("put_unpinned_when_asked", "32", "a put's blocks are given back while the store reads them",
           swap(Puts, "on_wanted", _unpinned_when_asked)),
    Mutant("put_waits_too_long", "9", "a store that does not answer keeps blocks longer than transfer_timeout",
           swap(Puts, "on_wanted", _patient)),
    Mutant("hold_begins_anew", "9", "every renewal begins the hold limit anew",
           swap(producer.Producer, "_extend", _held_anew)),
    Mutant("load_without_limit", "9", "progress takes a load past max_hold_s",
           swap(consumer.Consumer, "_wait", _no_hard_deadline)),
    Mutant("reasons_forgotten", "17", "whatever P refuses for, D fails for another reason",
           swap(consumer.__dict__, "reason_of", _any_reason)),
    Mutant("completed_twice", "10", "a prompt is said to be complete twice",
           swap(Doorway, "completed", _said_twice)),
)  # fmt: skip
