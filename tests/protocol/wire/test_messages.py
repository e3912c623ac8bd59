"""What two nodes say: typed, bounded, numbered once (promise 5), and named for people where bits differ."""

from __future__ import annotations

import inspect
import typing

import msgspec
import pytest

from kvbaton.protocol.wire import messages as m

KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(m.Message)

TAGS = {
    "Hello": 1, "Welcome": 2, "HelloRefused": 3, "Joined": 4, "Linked": 5, "Reset": 6, "Goodbye": 7,
    "Claim": 10, "Granted": 11, "ClaimRefused": 12, "Renew": 13, "Renewed": 14, "RenewRefused": 15, "Ready": 16,
    "Commit": 17, "Committed": 18, "Stale": 19, "Abandon": 20, "SourceLost": 21, "GrantedFrom": 22,
    "Offer": 30, "Accepted": 31, "Written": 32, "Ack": 33, "Revoke": 34, "Quiesced": 35,
}  # fmt: skip
"""The numbers on the wire. One that was ever used keeps its meaning."""


def test_tags_on_the_wire_never_change() -> None:
    assert {kind.__name__: kind.__struct_config__.tag for kind in KINDS} == TAGS
    assert len(set(TAGS.values())) == len(TAGS)


def test_every_message_of_the_module_can_be_said() -> None:
    defined = {
        value
        for value in vars(m).values()
        if inspect.isclass(value) and issubclass(value, m._Message) and value is not m._Message
    }
    assert defined == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_arrays(kind: type[msgspec.Struct]) -> None:
    """Arrays, so that fields can be added at the end and old readers skip them."""
    config = kind.__struct_config__
    assert config.frozen and config.array_like


def test_features_are_named_in_refusals() -> None:
    assert m.feature_names(m.Feature.PULL | m.Feature.PUSH) == "pull, push"
    assert m.feature_names(1 << 40 | m.Feature.STREAM) == "stream, bit 40"
    assert m.feature_names((1 << 62) + 16) == "bit 4, bit 62"
    assert m.feature_names(0) == ""


def test_all_features_are_all() -> None:
    assert sum(m.Feature) == m.ALL_FEATURES
