"""Overhears the messages between workers: each pair uses the newest version that both support (rule 24), and a worker
that leaves says goodbye to all peers.

Laws: a Hello, its refusal and a Reset are answered in the version that they came in, or must be read by anybody; one
claim in a few may be said in the oldest version. All else is said in the version of the pair.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.messages import Versions
from kvbaton_proof.sim.checks.dialogue import Dialogues
from kvbaton_proof.sim.checks.fences import Fences
from kvbaton_proof.sim.checks.ledger_consistency import LedgerConsistency
from kvbaton_proof.sim.checks.timer_checks import TimerChecks
from kvbaton_proof.sim.promises import RULE, Broken
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.sim_network import Network

_ENVELOPE = msgspec.msgpack.Decoder(tuple[int, str, int, int, int, msgspec.Raw])
_KINDS = {kind.__struct_config__.tag: kind for kind in m.Message.__args__}
_OF_ANY_VERSION = (m.Hello, m.HelloRefused, m.Reset)


class VersionChecks:
    """Hears every frame of every life of a cluster."""

    def __init__(self, network: Network, liars: Collection[WorkerId] = ()) -> None:
        self.liars = liars  # say what they like
        self._spoken: dict[int, Versions] = {}  # by incarnation
        self._dialogues = Dialogues(liars)
        self.goodbyes: set[tuple[int, int]] = set()  # who said so, and to whom
        network.on_said = self.said

    def watch(self, life: Life) -> None:
        if life.character.name not in self.liars:  # who also gets what it asks for
            self._spoken[life.peer.incarnation] = life.character.versions
            self._dialogues.watch(life)
            Fences(life)
            self._keep_books(life)

    def _keep_books(self, life: Life) -> None:
        LedgerConsistency(life)
        TimerChecks(life)

    def said(self, who: WorkerId, frame: bytes) -> None:
        if who in self.liars:
            return
        version, worker, speaker, listener, session, raw = _ENVELOPE.decode(frame)
        body = bytes(raw)
        kind = _KINDS[body[1]]
        self._dialogues.said(speaker, listener, session, body)
        if kind is m.Goodbye:
            self.goodbyes.add((speaker, listener))
        ours, theirs = self._spoken.get(speaker), self._spoken.get(listener)
        if ours is None or theirs is None or kind in _OF_ANY_VERSION:
            return
        newest = min(ours.newest, theirs.newest)
        if version != newest and not (kind is m.Claim and version == ours.oldest):
            raise Broken(RULE, f"{worker}: says {kind.__name__} in version {version}, and both speak {newest}")
