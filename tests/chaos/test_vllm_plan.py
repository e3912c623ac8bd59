"""The standard plan: the same for both connectors, and nothing in it that cannot be carried out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbaton_proof.chaos.chaos_plan import from_json, to_json
from kvbaton_proof.chaos.fault_catalogue import BY_NAME, FAULTS, ON_VLLM
from kvbaton_proof.chaos.vllm.vllm_steps import DO, MUTATIONS, poisoned, standard

GIVEN: dict[str, dict[str, Any]] = {
    "kvbaton": {"do_remote_prefill": True, "mode": "pull", "ticket": "abcdef"},
    "nixl": {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[1, 2, 3]],
        "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5, "tp_size": 1,
    },
}  # fmt: skip


def test_both_connectors_get_the_same_steps() -> None:
    ours, theirs = standard("kvbaton", 1), standard("nixl", 1)
    assert ours.steps == theirs.steps and ours.connector != theirs.connector


def test_a_plan_is_kept_as_json() -> None:
    plan = standard("nixl", 4)
    assert from_json(to_json(plan)) == plan


def test_what_is_said_to_run_on_vllm_is_in_the_plan_and_can_be_done() -> None:
    faults = {step.fault for step in standard("kvbaton", 1).steps}
    assert faults == {fault.name for fault in FAULTS if fault.vllm}
    assert faults | {fault.name for fault in ON_VLLM} == set(DO)
    assert all(BY_NAME[name].promises for name in faults)


def test_titles_tell_steps_apart() -> None:
    titles = [step.title() for step in standard("kvbaton", 1).steps]
    assert len(set(titles)) == len(titles)
    assert "kill p0 mid-copy" in titles and "stop p0 mid-copy 40 s" in titles


def test_a_part_of_the_plan_is_chosen_by_fault_or_title() -> None:
    assert {step.fault for step in standard("kvbaton", 1, ["flood", "abort"]).steps} == {"flood", "abort"}
    assert [step.title() for step in standard("kvbaton", 1, ["kill p0 mid-copy"]).steps] == ["kill p0 mid-copy"]


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'earthquake', expected one of kill, stop"):
        standard("kvbaton", 1, ["flood", "earthquake"])


@pytest.mark.parametrize("connector", ["kvbaton", "nixl"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_changes_what_p_gave(name: str, connector: str) -> None:
    given = GIVEN[connector]
    before = json.dumps(given)
    bad = poisoned(name, connector, given)
    assert bad != given and json.dumps(given) == before
    assert bad["do_remote_prefill"] is True
    json.dumps(bad)


def test_a_mutation_goes_to_the_field_of_the_connector() -> None:
    assert "remote_engine_id" not in poisoned("no source", "nixl", GIVEN["nixl"])
    assert poisoned("half the blocks", "nixl", GIVEN["nixl"])["remote_block_ids"] == [[1]]
    assert poisoned("a number of 2**62", "nixl", GIVEN["nixl"])["remote_block_ids"] == [[2**62] * 3]
    assert poisoned("half the blocks", "kvbaton", GIVEN["kvbaton"])["ticket"] == "abc"
    assert "ticket" not in poisoned("no blocks", "kvbaton", GIVEN["kvbaton"])


def test_parameters_of_another_connector_are_not_mutated() -> None:
    with pytest.raises(ValueError, match="remote_block_ids"):
        poisoned("no source", "nixl", GIVEN["kvbaton"])
