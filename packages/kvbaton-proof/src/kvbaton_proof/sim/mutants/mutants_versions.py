"""Wrong ideas about nodes of other protocol versions (rule 24)."""

from __future__ import annotations

from typing import Any

from kvbaton.node import node
from kvbaton.protocol.machines import pairing_state
from kvbaton.protocol.wire.messages import SPOKEN
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _own_newest(original: Any) -> Any:
    return lambda ours, greeted_in, bits: ours.newest


def _always_newest(original: Any) -> Any:
    def encode(sender: Any, to: Any, session: int, message: Any, version: int) -> Any:
        return original(sender, to, session, message, SPOKEN.newest)

    return encode


def _newest_once_linked(original: Any) -> Any:
    """The greeting is right; what follows forgets with whom it was settled."""

    def encode(sender: Any, to: Any, session: int, message: Any, version: int) -> Any:
        return original(sender, to, session, message, SPOKEN.newest if session else version)

    return encode


VERSION_MUTANTS: tuple[Mutant, ...] = (
    Mutant("source_settles_alone", "24", "P answers in its own newest version, whatever D speaks",
           swap(pairing_state.__dict__, "settle", _own_newest)),
    Mutant("hello_in_the_newest", "24", "an upgraded node says everything in its newest version",
           swap(node.__dict__, "encode", _always_newest)),
    Mutant("session_forgets_its_version", "24", "what is said in a session is not in the version that was settled",
           swap(node.__dict__, "encode", _newest_once_linked)),
)  # fmt: skip
