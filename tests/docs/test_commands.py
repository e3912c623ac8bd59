"""Every command that the documentation shows works: it is run, or, where it needs more than a test has, parsed by the
product's own parsers. `docs/contributing.md` says how a page is marked.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docs_commands import NEEDS, ROOT, Command, all_commands, blocks, commands_of, pages, spans
from docs_rules import RULES, DocsError, check
from docs_running import Reader, cluster

from kvbaton.cli.main import COMMANDS, build_parser, module_of

EVERY = all_commands()
RUN = sorted({command.page for command in EVERY if command.needs in ("", "cluster")})


@pytest.fixture(scope="module")
def cluster_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], int]]:
    """Starts the cluster of the quick start for whoever asks first."""
    opened: list[int] = []
    held = cluster(tmp_path_factory.mktemp("cluster"))

    def port() -> int:
        if not opened:
            opened.append(held.__enter__())
        return opened[0]

    yield port
    if opened:
        held.__exit__(None, None, None)


@pytest.mark.parametrize("command", EVERY, ids=str)
def test_a_command_is_one_that_the_product_takes(command: Command) -> None:
    assert not command.needs or command.needs in NEEDS, f"needs={command.needs}: choose one of {', '.join(NEEDS)}"
    check(command)


@pytest.mark.timeout(400)  # a dozen processes or more; seconds on a quiet machine
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, cluster_port: Callable[[], int]
) -> None:
    reader = Reader(tmp_path, cluster_port)
    try:
        for command in EVERY:
            if command.page == page and command.needs in ("", "cluster"):
                try:
                    reader.follow(command)
                except DocsError as error:
                    raise AssertionError(f"{command}: {command.text}\n{error}") from error
    finally:
        reader.close()


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in pages()])
def test_commands_stand_only_where_they_are_looked_for(page: str) -> None:
    """A block in another language that holds commands would never be run."""
    for block in blocks((ROOT / page).read_text()):
        assert block.language not in {"sh", "bash", "shell", "shell-session"}, f"{page}:{block.line}: call it console"
        if block.language != "console":
            said = [line for line in block.lines if re.match(r"^(\$ |kvbaton |make |\.venv/bin/)", line)]
            assert not said, f"{page}:{block.line}: commands in a block that is not called console: {said[0]}"
        elif block.before.startswith("<!-- run"):
            assert commands_of("", f"{block.before}\n```console\n" + "\n".join(block.lines) + "\n```")[0].needs or (
                "fails" in block.before
            ), f"{page}:{block.line}: a mark that says nothing: {block.before}"


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in pages()])
def test_what_a_line_of_text_calls_a_command_is_one(page: str) -> None:
    for span in spans((ROOT / page).read_text()):
        words = span.split()
        if words[0] in ("kvbaton", ".venv/bin/kvbaton") and len(words) > 1:
            _known_by_name(page, words)
        elif words[0] in ("make", "pytest") and "…" not in span and len(words) > 1:
            RULES[words[0]](words)


def _known_by_name(page: str, words: list[str]) -> None:
    """Its name and its flags; what stands for a value may be anything."""
    name = words[1]
    assert name in COMMANDS or name.startswith("-") or not re.fullmatch(r"[a-z]+", name), f"{page}: kvbaton {name}"
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    if name in COMMANDS and flags:
        parser = build_parser(name, module_of(name))
        assert not flags - _flags(parser), f"{page}: kvbaton {name} has no {', '.join(flags - _flags(parser))}"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                found |= _flags(one)
    return found


class TestItCanFail:
    """What is planted here must be noticed."""

    @pytest.mark.parametrize(
        "text",
        [
            "kvbaton nonsense",
            "kvbaton up --no-such-flag",
            "kvbaton worker --name p0 --role prefill --keys keys --registry 10.0.0.1:7700",
            "kvbaton worker … --store tcp://10.0.0.5:7710",
            "make no-such-target",
            "make vllm NO_SUCH_VARIABLE=1",
            "pytest tests/no_such_test.py",
            "python tools/no_such_tool.py",
            "frobnicate --all",
            "vllm-router --no-such-flag",
            "kubectl apply -k deploy/kubernetes/overlays/no-such-overlay",
            "pip install 'kvbaton[no-such-extra]'",
            "vllm serve MODEL --kv-transfer-config '{not json'",
            """vllm serve MODEL --kv-transfer-config '{"kv_connector": "BatonConnector",
               "kv_connector_module_path": "kvbaton.integrations.vllm", "kv_role": "kv_producer",
               "kv_connector_extra_config": {"name": "p0", "keys": "keys", "no_such_key": 1}}'""",
        ],
    )
    def test_a_command_that_nobody_can_run_is_noticed(self, text: str) -> None:
        (found,) = commands_of("planted.md", f"```console\n$ {text}\n```")
        with pytest.raises(DocsError):
            check(found)

    def test_one_that_ends_otherwise_than_the_page_says_is_noticed(self, tmp_path: Path) -> None:
        page = "```console\n$ kvbaton keys show nowhere\n```\n\n"
        page += "<!-- run: fails -->\n```console\n$ kvbaton chaos --list\n```"
        reader = Reader(tmp_path, lambda: 0)
        for command in commands_of("planted.md", page):
            with pytest.raises(DocsError, match="ended with"):
                reader.follow(command)

    def test_a_program_that_is_not_run_must_be_marked(self, tmp_path: Path) -> None:
        (found,) = commands_of("planted.md", "```console\n$ make demo\n```")
        with pytest.raises(DocsError, match="needs"):
            Reader(tmp_path, lambda: 0).follow(found)

    def test_commands_are_found_with_their_continuations_and_marks(self) -> None:
        assert commands_of("p.md", "```console\n$ a b#c 'd #e'  # it's\n```")[0].words == ["a", "b#c", "d #e"]
        shown = "$ vllm serve M \\\n    --x '{\n  \"a\": 1}'  # why\noutput\n$ make x"
        page = f"<!-- run: needs=vllm -->\n```console\n{shown}\n```\n"
        first, second = commands_of("p.md", page)
        assert first.words == ["vllm", "serve", "M", "--x", '{\n  "a": 1}'] and first.needs == "vllm"
        assert (second.text, second.line) == ("make x", 7)
