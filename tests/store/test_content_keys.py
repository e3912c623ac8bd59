"""Keys: equal content gives equal keys everywhere, and any difference that matters gives others."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.content import Content
from kvbaton.store.interface import HASH_BYTES, KEY_CHARS_MAX, Space, chain, is_key, keys, prefix

SPACE = Space(compat="0123456789abcdef" * 2, block_tokens=16, value_bytes=4096, layer_stop=32)
CONTENT = Content(tuple(range(64)), 64)


def hashes(content: Content, block_tokens: int = 16) -> list[bytes]:
    return list(chain(content, block_tokens))


def test_the_keys_of_a_prompt_never_change() -> None:
    """Golden: a store outlives releases, so these bytes may change only together with `kv1`."""
    front = prefix(SPACE)
    assert front == "kv1-0123456789abcdef0123456789abcdef-b1950ba2d920e0b8-r0.1-l0.32-p0-"
    assert [each.hex()[:16] for each in hashes(CONTENT)] == [
        "3bbe1141967bd37e",
        "75244518ca966560",
        "2b27a26eac802eda",
        "d42ccaa519e03a7f",
    ]


def test_another_process_finds_the_same_keys() -> None:
    code = (
        "from kvbaton.protocol.content import Content; from kvbaton.store.interface import chain;"
        "print(*(h.hex() for h in chain(Content(list(range(64)), 64, salt='s'), 16)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == [each.hex() for each in hashes(msgspec.structs.replace(CONTENT, salt="s"))]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compat", "f" * 32),
        ("block_tokens", 32),
        ("value_bytes", 8192),
        ("ranks", 2),
        ("group", "sliding"),
        ("layer_start", 1),
        ("layer_stop", 31),
        ("part", 1),
        ("layout", "bf16"),
    ],
)
def test_another_space_has_other_keys(field: str, value: object) -> None:
    assert prefix(msgspec.structs.replace(SPACE, **{field: value})) != prefix(SPACE)


def test_each_rank_of_an_engine_has_its_own_keys() -> None:
    fronts = {prefix(msgspec.structs.replace(SPACE, ranks=4, rank=rank)) for rank in range(4)}
    assert len(fronts | {prefix(SPACE)}) == 5


@pytest.mark.parametrize(
    "changed",
    [
        Content(CONTENT.tokens, 64, lora="a"),
        Content(CONTENT.tokens, 64, multimodal=("image:1@0+4",)),
        Content(CONTENT.tokens, 64, salt="tenant"),
        Content(CONTENT.tokens, 64, embeddings=b"1"),
        Content((99, *CONTENT.tokens[1:]), 64),
    ],
)
def test_what_shapes_the_kv_changes_every_hash(changed: Content) -> None:
    assert not set(hashes(CONTENT)) & set(hashes(changed))


def test_a_later_token_changes_only_what_comes_after() -> None:
    changed = Content((*CONTENT.tokens[:40], 99, *CONTENT.tokens[41:]), 64)
    ours, theirs = hashes(CONTENT), hashes(changed)
    assert ours[:2] == theirs[:2]
    assert not set(ours[2:]) & set(theirs)


def test_only_whole_blocks_up_to_the_position_have_a_hash() -> None:
    assert [len(hashes(Content(CONTENT.tokens, position))) for position in (0, 15, 16, 31, 32, 64, 999)] == [
        0, 0, 1, 1, 2, 4, 4,
    ]  # fmt: skip
    assert hashes(Content(CONTENT.tokens, 40)) == hashes(CONTENT)[:2]


def test_blocks_of_another_size_share_nothing() -> None:
    assert not set(hashes(CONTENT, 16)) & set(hashes(CONTENT, 32))


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.integers(-(2**40), 2**40), max_size=40), st.lists(st.integers(-(2**40), 2**40), max_size=40))
def test_prompts_share_exactly_the_blocks_of_their_common_prefix(ours: list[int], theirs: list[int]) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    here, there = hashes(Content(ours, len(ours)), 4), hashes(Content(theirs, len(theirs)), 4)
    shared = common // 4
    assert here[:shared] == there[:shared]
    assert not set(here[shared:]) & set(there[shared:])


def test_keys_are_bounded_text() -> None:
    huge = Space(
        compat="f" * 32, block_tokens=1 << 20, value_bytes=1 << 32, ranks=4096, rank=4095, group="g" * 1000,
        layer_start=65535, layer_stop=65536, part=4096, layout="x" * 1000,
    )  # fmt: skip
    [key] = keys(prefix(huge), [b"\xff" * HASH_BYTES])
    assert len(key) <= KEY_CHARS_MAX
    assert is_key(key)
    assert not any(map(is_key, ("", "A", "a/b", "a b", "../x", "é", ".", "x" * 193, "a\n")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compat", "XYZ"),
        ("block_tokens", 0),
        ("value_bytes", 0),
        ("ranks", 0),
        ("rank", 1),
        ("rank", -1),
        ("layer_stop", 0),
    ],
)
def test_a_space_that_makes_no_sense_is_refused_by_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}:"):
        prefix(msgspec.structs.replace(SPACE, **{field: value}))
    with pytest.raises(ValueError, match=r"^block_tokens:"):
        hashes(CONTENT, 0)
