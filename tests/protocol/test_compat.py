"""Promise 1: engines whose KV could mean different things never pair, and the refusal says why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.content import compat_digest, difference, validate_key
from kvbaton.protocol.errors import ProtocolError, Reason

OURS = {"model": "llama-8b", "weights": "ab12", "dtype": "bfloat16", "info.version": "1.0"}


def test_equal_keys_have_no_difference() -> None:
    assert difference(OURS, dict(OURS)) is None


def test_the_first_differing_field_is_named_with_both_values() -> None:
    theirs = {**OURS, "weights": "cd34", "dtype": "float16"}
    assert difference(OURS, theirs) == "weights: ours is 'ab12', theirs is 'cd34'"


def test_versions_may_differ() -> None:
    theirs = {**OURS, "info.version": "2.0", "info.host": "b"}
    assert difference(OURS, theirs) is None
    assert compat_digest(OURS) == compat_digest(theirs)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({"a": "1", "isa": "neon"}, {"a": "1"}, "isa: ours is 'neon', theirs is not stated"),
        ({"a": "1"}, {"a": "1", "isa": "amx"}, "isa: ours is not stated, theirs is 'amx'"),
        ({"a": ""}, {}, "a: ours is '', theirs is not stated"),
    ],
)
def test_a_field_that_only_one_side_states_is_a_difference(
    ours: dict[str, str], theirs: dict[str, str], told: str
) -> None:
    assert difference(ours, theirs) == told


def test_the_digest_is_short_stable_and_blind_to_order() -> None:
    assert compat_digest(OURS) == compat_digest(dict(reversed(OURS.items())))
    assert compat_digest({"model": "m", "dtype": "bfloat16"}) == "e514864abfd8ed5d7f96bdfe59254cf6"


def test_field_boundaries_are_part_of_the_digest() -> None:
    assert compat_digest({"a": "bc"}) != compat_digest({"ab": "c"})


keys = st.dictionaries(st.sampled_from(["a", "b", "c", "info.x"]), st.sampled_from(["", "1", "2"]))


@settings(deadline=None, derandomize=True)
@given(keys, keys)
def test_no_difference_means_equal_digests_and_the_other_way_round(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    assert (difference(ours, theirs) is None) == (compat_digest(ours) == compat_digest(theirs))
    assert (difference(ours, theirs) is None) == (difference(theirs, ours) is None)


def test_a_key_within_its_bounds_passes() -> None:
    assert validate_key(OURS) is OURS


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ({str(i): "" for i in range(65)}, "compat: 65 fields"),
        ({"": "x"}, "compat: name ''"),
        ({"n" * 257: "x"}, "compat: name 'nnn"),
        ({"a\n": "x"}, "compat: name 'a"),
        ({"model": "x" * 257}, "compat.model"),
        ({"model": "\ud800"}, "compat.model"),
    ],
)
def test_a_key_out_of_bounds_is_refused_by_field(key: dict[str, str], field: str) -> None:
    with pytest.raises(ProtocolError) as error:
        validate_key(key)
    assert error.value.reason is Reason.BAD_MESSAGE
    assert error.value.detail.startswith(field)
