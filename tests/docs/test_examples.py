"""The examples that pages show in Python are whole, and keep the contracts that they are shown for."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from docs_commands import ROOT, blocks
from docs_examples import example

from kvbaton.testing import Case, EngineCase, EngineRig, InProcessHarness, check_engine, check_transport
from kvbaton.testing.transport_case import offered
from kvbaton.transports import catalogue


@pytest.fixture(scope="module")
def transport() -> Iterator[ModuleType]:
    yield example("write-a-transport.md", "docs_transport", 1)


def harness_of(module: ModuleType) -> InProcessHarness:
    return InProcessHarness(module.LocalTransport, lambda size: memoryview(bytearray(size)), module.CAPABILITIES)


@pytest.mark.parametrize("case", check_transport.cases, ids=str)
def test_the_transport_of_the_page_keeps_the_contract(case: Case, transport: ModuleType) -> None:
    harness = harness_of(transport)
    if case.needs <= offered(harness):
        case(harness)
    else:
        assert case.needs & {"write", "fence", "kill", "pause", "lends", "knows_writes"}, "only these may be left out"


def test_the_page_shows_how_the_contract_is_run_and_that_is_so() -> None:
    module = example("write-a-transport.md", "docs_transport_whole")
    assert "scattered_spans_arrive_exactly" not in module.skipped and module.skipped
    cases = [mark for mark in module.test_the_contract_is_kept.pytestmark if mark.name == "parametrize"]
    assert len(cases[0].args[1]) > 10
    assert not module.DOORS, "every door is shut again"
    assert catalogue.problem_of(module.PLANE, "local") == ""
    shown = next(
        block for block in blocks((ROOT / "docs" / "write-a-transport.md").read_text()) if block.language == "toml"
    )
    assert "\n".join(shown.lines) in (ROOT / "examples" / "transport" / "pyproject.toml").read_text()


def test_a_transport_that_breaks_a_law_would_be_noticed(transport: ModuleType) -> None:
    class Careless(transport.LocalTransport):  # type: ignore[misc, name-defined]
        def _move(self, *_: object) -> None:
            return None  # says that it has moved what it has not

    harness = InProcessHarness(Careless, lambda size: memoryview(bytearray(size)), transport.CAPABILITIES)
    case = next(case for case in check_transport.cases if case.name == "scattered_spans_arrive_exactly")
    with pytest.raises(AssertionError):
        case(harness)


# --- the engine adapter


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    yield example("write-an-engine-adapter.md", "docs_engine", 1)


@pytest.mark.parametrize("case", check_engine.cases, ids=str)
def test_the_engine_adapter_of_the_page_keeps_the_contract(case: EngineCase, engine: ModuleType) -> None:
    case(EngineRig(engine.ToyEngine))


def test_the_page_shows_how_an_engine_is_checked_and_put_into_a_cluster_and_that_is_so() -> None:
    module = example("write-an-engine-adapter.md", "docs_engine_whole")
    alone = EngineRig(module.ToyEngine).alone(range(1, 20))
    assert (module.answer, module.delivered) == (alone, 1)
    held = ("pinned_blocks", "busy")
    assert not any(getattr(each.engine.doorway, name) for each in (module.p, module.d) for name in held)
