"""Transports of other packages: entry points of the group `kvbaton.transports`, each naming a `CatalogueEntry`.

Laws: a package's code is imported only when an operator has named its transport (or runs `kvbaton doctor`); its name is
known from the metadata alone. `auto` never offers one. A name that this package has, or that two packages claim, is
refused where it is used, naming the packages: no transport ever replaces another.
"""

from __future__ import annotations

import functools
import re
from importlib.metadata import EntryPoint, entry_points

import msgspec

from kvbaton.transports.builtin_entries import DISTRIBUTIONS, PLANES
from kvbaton.transports.catalogue_entry import CatalogueEntry, PlaneError

GROUP = "kvbaton.transports"
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
RESERVED = ("auto",)
PAGE = "docs/write-a-transport.md"


@functools.cache
def claims() -> dict[str, tuple[EntryPoint, ...]]:
    """Transports of installed packages, by name. Read once: a later installation needs a new process."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, package_of(point))):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def names() -> tuple[str, ...]:
    """Transports that can be named."""
    return tuple(name for name in claims() if not conflict(name) and NAME.fullmatch(name) and name not in RESERVED)


def conflict(name: str) -> str:
    """Why a name must not be used; "" when only one transport has it."""
    packages = [package_of(point) for point in claims().get(name, ())]
    if packages and name in PLANES:
        return (
            f"transport {name} is kvbaton's own, and package {packages[0]} claims that name too; "
            f"uninstall it (pip uninstall {packages[0]}), or have its entry point renamed"
        )
    if len(packages) > 1:
        return (
            f"transport {name} is claimed by the packages {' and '.join(packages)}; "
            f"uninstall all but one (pip uninstall {packages[-1]})"
        )
    return ""


def how_to_get(name: str) -> str:
    return f"pip install {DISTRIBUTIONS[name]}" if name in DISTRIBUTIONS else "install the package that has it"


@functools.cache
def load(name: str) -> CatalogueEntry:
    """The entry of another package. PlaneError names the package, and what to do."""
    if name not in claims():
        raise PlaneError(f"no transport {name}: choose from {', '.join(PLANES)}, or {how_to_get(name)}")
    (point,) = claims()[name]
    package = package_of(point)
    try:
        plane: CatalogueEntry = point.load()
    except Exception as error:  # external module: it may raise anything
        raise PlaneError(
            f"transport {name} of package {package} cannot be loaded ({point.value}): {type(error).__name__}: {error}; "
            f"update the package, or uninstall it (pip uninstall {package})"
        ) from error
    if problem := problem_of(plane, name):
        raise PlaneError(
            f"transport {name} of package {package} is not one ({point.value}): {problem}; "
            f"tell its author ({PAGE}), or uninstall it (pip uninstall {package})"
        )
    return msgspec.structs.replace(plane, in_auto=lambda: False)


def problem_of(plane: object, name: str) -> str:
    """Why a package's object is not a valid entry; "" when it is."""
    if not isinstance(plane, CatalogueEntry):
        return f"expected a kvbaton.transports.catalogue_entry.CatalogueEntry, got a {type(plane).__name__}"
    if plane.name != name:
        return f"its entry is named {plane.name!r}"
    try:
        capabilities = plane.capabilities()
    except Exception as error:  # noqa: BLE001 - as above
        return f"its capabilities cannot be read: {error!r}"
    if capabilities.name != name:
        return f"its capabilities are named {capabilities.name!r}"
    makers = {"cpu": plane.make, "cuda": plane.make_device}
    missing = [kind for kind in capabilities.device_kinds if makers.get(kind) is None]
    return f"it claims to move {missing[0]} memory, but has no maker for that" if missing else ""
