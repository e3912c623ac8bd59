"""Data planes that a pair does without: D knows of each, or would never try it again (rule 23).

Law: when a link is up, every plane that both have and that is better than the one in use has failed at one of the two,
so D remembers it as left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton_proof.sim.promises import RULE, Broken
from kvbaton_proof.sim.world.life import Life


def watch(life: Life, lives: Mapping[WorkerId, Life], liars: Collection[WorkerId]) -> None:
    consumer = life.node.ledger.consumer
    on_link_up = consumer.on_link_up

    def up(link: Link, now: float) -> None:
        if link.worker not in liars:  # who lies may take any plane
            _check(life, lives[link.worker], link)
        on_link_up(link, now)

    consumer.on_link_up = up  # type: ignore[method-assign]


def _check(life: Life, source: Life, link: Link) -> None:
    assert link.transport is not None
    both = [name for name in source.character.transports if name in life.character.transports]
    forgotten = set(both[: both.index(link.transport.name)]) - set(link.choice.left_out)
    if forgotten and link.peer == source.peer:
        what = f"reads from {link.worker} over {link.transport.name}, and does not know of {sorted(forgotten)}"
        raise Broken(RULE, f"{life.character.name}: {what}")
