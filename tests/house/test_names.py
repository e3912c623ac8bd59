"""One word per thing: no two classes of the product share a name, no two modules share one."""

from __future__ import annotations

from collections import defaultdict

from tests.house.reading import PROOF, classes, modules

SAME_MODULE_NAME = {
    "__main__": "the interpreter's name for what `python -m package` runs",
}
"""Names of modules that may stand in several packages, and why."""

COMMANDS = "cli"
"""A command's file is named after the command, whatever the library behind it is called."""


def test_no_two_classes_of_the_product_share_a_name() -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for each in classes():
        if not each.module.startswith(PROOF):
            by_name[each.name].append(each.place)
    assert {name: places for name, places in by_name.items() if len(places) > 1} == {}


def test_no_module_name_stands_in_two_packages() -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        package, _, name = module.rpartition(".")
        if package != COMMANDS and name not in SAME_MODULE_NAME:
            by_name[name].append(module)
    assert {name: found for name, found in by_name.items() if len(found) > 1} == {}


def test_no_exception_is_left_over() -> None:
    names = {module.rpartition(".")[2] for module in modules()}
    assert set(SAME_MODULE_NAME) - names == set()
