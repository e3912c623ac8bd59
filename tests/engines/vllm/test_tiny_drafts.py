"""Configurations of tiny models with an MTP layer: in the words of the transformers that wrote them, and of vLLM."""

from __future__ import annotations

import pytest

from kvbaton.engines.vllm.models import tiny_model
from kvbaton.engines.vllm.models.tiny_model import KINDS


@pytest.mark.parametrize("types", [["mamba", "attention", "mlp"], ["linear_attention", "full_attention", "mlp"]])
@pytest.mark.parametrize("field", ["layers_block_type", "layer_types"])
def test_the_mtp_layer_has_attention_by_the_name_that_this_transformers_writes(field: str, types: list[str]) -> None:
    found = tiny_model._nemotron_config({field: types, "hidden_size": 8})
    assert found["mtp_layers_block_type"] == [types[1]]
    assert (found["num_nextn_predict_layers"], found["hidden_size"]) == (1, 8)


def test_every_model_with_a_drafter_is_a_kind_of_tiny_model() -> None:
    assert set(tiny_model.DRAFTED) <= set(KINDS)
    for kind, count in (("few-words", tiny_model.WORDS), ("ernie-mtp", tiny_model.FEW_WORDS)):
        assert len(set(tiny_model.words_of(kind, list(range(90))))) == count
