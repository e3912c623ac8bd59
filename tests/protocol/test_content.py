"""Rule 2: a digest names what the KV is of; whatever shapes the KV changes it, in every process alike."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest

from kvbaton.protocol.content import DIGEST_BYTES, Content, digest

BASE = Content([1, 2, 3], 3)
OTHERS = [
    Content([1, 2, 4], 3),
    Content([1, 2], 3),
    Content([1, 2, 3], 2),
    Content([1, 2, 3], 3, lora="a"),
    Content([1, 2, 3], 3, salt="a"),
    Content([1, 2, 3], 3, multimodal=("a",)),
    Content([1, 2, 3], 3, multimodal=("a", "b")),
    Content([1, 2, 3], 3, multimodal=("ab",)),
    Content([], 3, embeddings=b"a"),
    Content([], 3),
    Content([3, 2, 1], 3),
    Content([1, 2, 3 + (1 << 32)], 3),
]


def test_the_digest_is_the_same_in_every_process() -> None:
    """A golden value: P, D and the router may run other versions of Python on other machines."""
    assert digest(BASE).hex() == "1dff8e202015f0d5b23fafaede4af3bb"
    assert len(digest(BASE)) == DIGEST_BYTES


def test_the_kind_of_sequence_does_not_matter() -> None:
    assert digest(BASE) == digest(msgspec.structs.replace(BASE, tokens=(1, 2, 3)))


@pytest.mark.parametrize(("one", "other"), list(combinations([BASE, *OTHERS], 2)))
def test_whatever_shapes_the_kv_changes_the_digest(one: Content, other: Content) -> None:
    assert digest(one) != digest(other)
