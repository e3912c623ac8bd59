"""Transports of other packages: known by name, loaded only when named, and never in another one's place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbaton.testing import Case, InProcessHarness, check_transport
from kvbaton.testing.transport_case import offered
from kvbaton.transports import catalogue
from kvbaton.transports.catalogue import PlaneError, PlaneSettings
from kvbaton.transports.core.shared_memory import Region, allocate
from tests.transports.example_package import install

Publish = Callable[..., None]

ENTRY = """
from kvbaton.protocol.effects import Capabilities
from kvbaton.transports.builtin_entries import CatalogueEntry

CAN = Capabilities({name!r}, one_sided=True, can_write=False, can_fence=False, cancels=True, same_host=True)
PLANE = CatalogueEntry(name={name!r}, what="a test", capabilities=lambda: CAN, make=lambda me, settings: None)
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is installed is looked up anew, before and after."""
    for cache in (catalogue.claims, catalogue.load):
        cache.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cache in (catalogue.claims, catalogue.load):
        cache.cache_clear()


@pytest.fixture
def publish(fresh: pytest.MonkeyPatch, tmp_path: Path) -> Publish:
    """Installs a package with one module, whose entry point for `name` is its `PLANE`."""
    fresh.syspath_prepend(tmp_path)

    def publish(package: str, name: str, text: str = "", entry: str = "PLANE") -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(text or ENTRY.format(name=name))
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{catalogue.GROUP}]\n{name} = {module}:{entry}\n")

    return publish


def test_it_is_offered_by_name_only_and_not_imported_before(publish: Publish) -> None:
    publish("other-transport", "other")
    assert catalogue.names() == (*catalogue.ORDER, "other") and catalogue.parse("other, tcp") == ("other", "tcp")
    assert "other" not in catalogue.offered("auto") and "other_transport" not in sys.modules
    assert catalogue.offered("other,tcp") == ("other", "tcp") and "other_transport" in sys.modules
    assert catalogue.capabilities("other+sums").name == "other+sums"
    assert not catalogue.plane_of("other").in_auto()
    assert "not encrypted" in catalogue.exposed("other", "10.0.0.1") or catalogue.capabilities("other").same_host


def test_a_name_of_our_own_is_refused_and_auto_goes_on(publish: Publish) -> None:
    publish("impostor", "tcp")
    with pytest.raises(ValueError, match=r"tcp is kvbaton's own, and package impostor claims.*pip uninstall impostor"):
        catalogue.parse("tcp")
    assert "tcp" in catalogue.offered("auto") and "impostor" not in sys.modules
    assert catalogue.plane_of("tcp") is catalogue.PLANES["tcp"]


def test_a_name_that_two_packages_claim_is_refused(publish: Publish) -> None:
    publish("one-package", "other")
    publish("two-package", "other")
    with pytest.raises(ValueError, match="claimed by the packages one-package and two-package; uninstall all but one"):
        catalogue.parse("other")
    assert "other" not in catalogue.names()


@pytest.mark.parametrize("name", ["auto", "Other", "other+sums", "a,b"])
def test_a_name_that_could_mean_something_else_does_not_exist(publish: Publish, name: str) -> None:
    publish("other-names", name)
    assert catalogue.names() == catalogue.ORDER and catalogue.parse("auto") == ("auto",)


@pytest.mark.parametrize(
    ("text", "entry", "said"),
    [
        ("raise RuntimeError('no licence')", "PLANE", "cannot be loaded.*RuntimeError: no licence; update the package"),
        ("", "MISSING", "cannot be loaded.*AttributeError"),
        ("PLANE = 7", "PLANE", "is not one.*got a int; tell its author"),
        (ENTRY.format(name="another"), "PLANE", "its entry is named 'another'"),
        (ENTRY.format(name="broken").replace("=lambda: CAN", "=lambda: 1 / 0"), "PLANE", "capabilities cannot be read"),
        (ENTRY.format(name="broken").replace("CAN = Capabilities('broken'", "CAN = Capabilities('x'"), "PLANE",
         "its capabilities are named 'x'"),
        (ENTRY.format(name="broken").replace(", make=lambda me, settings: None", ""), "PLANE", "no maker for that"),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_used_is_refused_by_its_package(
    publish: Publish, text: str, entry: str, said: str, request: pytest.FixtureRequest
) -> None:
    package = f"broken-{request.node.callspec.indices['text']}"
    publish(package, "broken", text, entry)
    assert catalogue.parse("broken") == ("broken",), "nothing was imported yet"
    with pytest.raises(PlaneError, match=f"(?s)transport broken of package {package}.*{said}.*uninstall"):
        catalogue.offered("broken")


# --- the example


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("example"))


@pytest.fixture
def harness(target: Path, fresh: pytest.MonkeyPatch) -> Iterator[InProcessHarness]:
    fresh.syspath_prepend(target)
    make, regions = catalogue.plane_of("procfs").make, list[Region]()
    assert make is not None

    def memory(size: int) -> memoryview:
        regions.append(allocate(size))
        return regions[-1].view

    yield InProcessHarness(lambda me: make(me, PlaneSettings()), memory, catalogue.capabilities("procfs"))
    for region in regions:
        region.close()


@pytest.mark.parametrize("case", check_transport.cases, ids=str)
def test_the_example_keeps_the_contract(case: Case, harness: InProcessHarness) -> None:
    if case.needs <= offered(harness):
        case(harness)
    else:
        assert case.needs & {"write", "fence", "kill", "pause", "lends", "knows_writes"}, "only these may be left out"
