"""Rule 10: readiness is counted in whole blocks per group and layer, and old news are told from new ones."""

from __future__ import annotations

from itertools import product

from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.machines.readiness import complete, covers

LAYERS = 3
STEPS = [GroupProgress(done, ahead, layers) for done, ahead, layers in product(range(3), range(3), range(LAYERS + 1))]
SANE = [step for step in STEPS if step.blocks_ahead >= step.blocks_done or not step.layers_ahead]


def test_complete_means_every_layer_of_every_block() -> None:
    assert complete(whole([2, 3]), [2, 3])
    assert complete(whole([2, 4]), [2, 3])
    assert not complete(whole([2, 2]), [2, 3])
    assert not complete((GroupProgress(1, 2, LAYERS - 1),), [2])


def test_covers_is_having_at_least_as_much_of_every_layer() -> None:
    for new, old in product(SANE, SANE):
        expected = all(new.ready(layer) >= old.ready(layer) for layer in range(LAYERS + 1))
        assert covers((new,), (old,)) is expected, (new, old)


def test_one_group_behind_is_behind() -> None:
    assert not covers((GroupProgress(3), GroupProgress(1)), (GroupProgress(2), GroupProgress(2)))
