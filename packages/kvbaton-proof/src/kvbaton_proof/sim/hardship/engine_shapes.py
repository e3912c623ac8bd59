"""The KV shapes of a world's engines, and how P's and D's differ. Drawn from a separate random stream.

Law: P's and D's shapes can be mapped onto each other; what cannot is refused by name, which tests see to.
"""

from __future__ import annotations

import random

import msgspec

from kvbaton.protocol.geometry.layout import GroupKind, Per
from kvbaton_proof.sim.world.sim_memory import Shape

Two = tuple[int, int]
"""P's and D's."""


class Variety(msgspec.Struct, frozen=True, kw_only=True):
    """What the shapes of one world have in common, and in what the two sides differ."""

    seed: int = 0
    block_tokens: Two
    ranks: Two
    stages: Two = (1, 1)
    kinds: tuple[GroupKind, ...] = ()
    window: int = 0
    heads: int = 2
    apart: bool = False
    per: Per = Per.TOKEN
    regions: Two = (1, 1)
    optional: int = 0  # groups that P has and D has not

    def of(self, shape: Shape, name: str, side: int) -> Shape:
        """This shape as it is on one side."""
        order = shape.order
        if self.per is not Per.TOKEN:  # inside such a cell only the engine knows its way
            order = "HNP"
        elif self.apart:
            order = random.Random(f"{self.seed} {name}").choice(("HNP", "NHP", "PHN", "PNH"))
        groups = len(shape.group_layers) - (self.optional if side else 0)
        return msgspec.structs.replace(
            shape,
            group_layers=shape.group_layers[:groups],
            stages=self.stages[side],
            heads=self.heads,
            order=order,
            kinds=self.kinds[:groups],
            window=self.window,
            apart=self.apart,
            per=self.per,
            regions=self.regions[side],
            optional=0 if side else self.optional,
        )


def draw(rng: random.Random, layers: tuple[int, ...], block_tokens: Two, ranks: Two, partly_stale: bool) -> Variety:
    """`rng` is this module's own; the rest is what the world drew. In nearly half of all worlds it stays so."""
    plain, seed, groups = rng.random() < 0.45, rng.getrandbits(64), len(layers)

    def one_in(count: float) -> bool:
        return rng.random() * count < 1 and not plain

    if partly_stale and rng.random() < 0.7:  # a good prefix is counted in P's blocks
        block_tokens = rng.choice(((2, 4), (2, 4), (2, 6), (4, 2)))
    elif one_in(3):
        block_tokens = rng.choice(((2, 4), (4, 2), (4, 6), (6, 4), (3, 2), (2, 6)))
    if one_in(4):
        ranks = rng.choice(((1, 4), (2, 4), (4, 1), (4, 4)))
    stages = rng.choice(((1, 2), (2, 1), (2, 2))) if one_in(4) else (1, 1)
    ranks = max(ranks[0], stages[0]), max(ranks[1], stages[1])
    kinds, window, heads = (GroupKind.FULL,) * groups, 0, 2
    if one_in(6):
        kinds, heads = (GroupKind.LATENT,) * groups, 1
    elif one_in(3):
        kinds = (*kinds[1:], rng.choice((GroupKind.SLIDING, GroupKind.SLIDING, GroupKind.CHUNKED)))
        window = rng.choice((2, 3, 5, 8))
    apart, per = one_in(3), Per.TOKEN
    if block_tokens[0] == block_tokens[1] and not apart and one_in(4):
        same = ranks[0] == ranks[1] and stages[0] == stages[1]
        per = rng.choice((Per.HEAD, Per.PAGE)) if same else Per.HEAD
    regions = rng.choice(((1, 2), (2, 1), (2, 2))) if one_in(4) else (1, 1)
    optional = int(sum(layers[:-1]) >= stages[1] and one_in(4))  # every stage has a layer
    if not partly_stale and one_in(6):  # a state goes whole, from a rank to its like
        kinds, optional, per = (*kinds[:-1], GroupKind.STATE), 0, Per.TOKEN
        block_tokens, ranks, stages = ((each[0], each[0]) for each in (block_tokens, ranks, stages))
    return Variety(
        seed=seed,
        block_tokens=block_tokens,
        ranks=ranks,
        stages=stages,
        kinds=kinds,
        window=window,
        heads=heads,
        apart=apart,
        per=per,
        regions=regions,
        optional=optional,
    )
