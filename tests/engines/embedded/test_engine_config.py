from __future__ import annotations

import pytest

from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig, KvGroup, ModelConfig


def test_a_model_without_sliding_layers_has_one_group() -> None:
    assert ModelConfig().groups == (KvGroup((0, 1, 2), None),)


def test_sliding_layers_form_the_second_group() -> None:
    assert ModelConfig(sliding_layers=(2, 0)).groups == (KvGroup((1,), None), KvGroup((0, 2), 64))


def test_a_model_may_slide_in_all_layers() -> None:
    assert ModelConfig(layers=2, sliding_layers=(0, 1)).groups == (KvGroup((0, 1), 64),)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"heads": 3}, "heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"sliding_layers": (3,)}, "sliding"),
        ({"window_tokens": 0}, "window"),
    ],
)
def test_a_model_that_cannot_be_names_its_field(bad: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bad", "named"), [({"block_tokens": 12}, "block_tokens=12"), ({"blocks": 1}, "blocks=1")])
def test_a_cache_that_cannot_be_names_its_field(bad: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CacheConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["seqs_max", "step_tokens_max", "waiting_max"])
def test_an_engine_that_could_do_nothing_names_its_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        EngineConfig(**{field: 0})  # type: ignore[arg-type]
