"""Settings from flag, environment, file and default: which one decides, what is refused, and how it is told."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.cli import main as cli
from kvbaton.cli.settings import layers
from kvbaton.cli.settings.file import FILE_BYTES_MAX, ITEMS_MAX, PROBLEMS_MAX, parse, read
from kvbaton.processes.operator_errors import CommandError


def parsed(command: str, *words: str, **variables: str) -> argparse.Namespace:
    """As the program would parse it, with these variables of that command."""
    parser = cli.build_parser(command, cli.module_of(command))
    environ = {layers.variable_of(command, key): value for key, value in variables.items()}
    return layers.parse(parser, command, [command, *words], environ)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "cluster.yaml").write_text(text)
        return str(tmp_path / "cluster.yaml")

    return write


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(words)
    return (status, *capsys.readouterr())


class TestPrecedence:
    def test_flag_before_environment_before_file_before_default(self, file: Any) -> None:
        path = file("router:\n  port: 1\n  registry_port: 1\n  drain_s: 1\n")
        args = parsed("router", "--config", path, "--port", "3", port="2", registry_port="2")
        assert (args.port, args.registry_port, args.drain_s, args.join_port) == (3, 2, 1.0, None)
        assert {key: each.source for key, each in args.given.items()} == {
            "registry_port": "environment", "drain_s": "file",
        }  # fmt: skip

    def test_a_list_replaces_that_of_a_lower_place(self, file: Any) -> None:
        path = file("router:\n  prefill-url: [http://a:1, http://b:1]\n  decode_url:\n    - http://c:1\n")
        assert parsed("router", "--config", path).prefill_url == ["http://a:1", "http://b:1"]
        args = parsed("router", "--config", path, "--decode-url", "http://f:1", prefill_url="http://d:1,http://e:1")
        assert (args.prefill_url, args.decode_url) == (["http://d:1", "http://e:1"], ["http://f:1"])
        assert parsed("router", "--config", file("router:\n  prefill_url: []\n")).prefill_url == []

    def test_lists_of_the_kinds_that_flags_have(self, file: Any) -> None:
        path = file("router:\n  api_key: [a, b]\n  allow_origin: ['https://x.example']\nworker:\n  modes: push,pull\n")
        args = parsed("router", "--config", path)
        assert (args.api_key, args.allow_origin) == (["a", "b"], ["https://x.example"])
        args = parsed("worker", "--config", path, "--name", "p0", "--role", "prefill", "--registry", "tcp://a:1")
        assert args.modes == ("push", "pull")

    def test_a_flag_turns_off_what_the_file_turned_on(self, file: Any) -> None:
        path = file("router:\n  only_mode: true\n  no_same_host: true\n")
        args = parsed("router", "--config", path)
        assert args.only_mode and args.no_same_host
        args = parsed("router", "--config", path, "--no-only-mode", "--same-host")
        assert not args.only_mode and not args.no_same_host
        assert not parsed("router", "--config", path, only_mode="false").only_mode

    def test_the_environment_can_name_the_file_and_an_empty_variable_is_none(self, file: Any) -> None:
        assert parsed("up", config=file("up:\n  prefill: 3\n"), decode="").prefill == 3

    def test_without_any_of_it_a_command_gets_what_its_flags_say(self) -> None:
        for command in layers.CONFIGURED:
            words = [command, "--name", "p0"] if command != "up" else [command]
            words += ["--role", "prefill", "--registry", "tcp://a:1"] if command == "worker" else []
            words += ["--keys", "k"] if command in ("store", "registry") else []
            plain = cli.build_parser(command, cli.module_of(command)).parse_args(words)
            args = vars(parsed(command, *words[1:]))
            assert args.pop("given") == {}
            assert args == vars(plain)

    def test_what_a_worker_needs_may_stand_anywhere(self, file: Any, capsys: pytest.CaptureFixture[str]) -> None:
        path = file("worker:\n  role: decode\n")
        args = parsed("worker", "--config", path, "--registry", "tcp://a:1", name="d0")
        assert (args.name, args.role, args.registry) == ("d0", "decode", "tcp://a:1")
        with pytest.raises(SystemExit):
            parsed("worker", "--config", path, "--registry", "tcp://a:1")
        said = capsys.readouterr().err
        assert "--name" in said and "KVBATON_WORKER__NAME" in said and "below worker:" in said

    def test_children_do_not_read_it_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVBATON_WORKER__BLOCKS", "64")
        monkeypatch.setenv("KVBATON_ROUTER_PORT", "tcp://10.0.0.1:8000")
        assert cli.main(["explain", "lease_expired", "--json"]) == 0
        assert "KVBATON_WORKER__BLOCKS" not in os.environ
        assert os.environ["KVBATON_ROUTER_PORT"] == "tcp://10.0.0.1:8000"

    def test_a_variable_with_one_underscore_is_noticed_unless_kubernetes_set_it(self) -> None:
        keys = ("port", "keys")
        assert not list(layers.overlooked("router", keys, {"KVBATON_ROUTER_PORT": "tcp://10.0.0.1:8000"}))
        (said,) = layers.overlooked("router", keys, {"KVBATON_ROUTER_PORT": "8000"})
        assert "KVBATON_ROUTER__PORT" in said


WRONG = {
    "router:\n  prot: 1\n": (2, "router.prot: unknown key, did you mean port?"),
    "router:\n  port: eight\n": (2, "router.port: got 'eight', expected a whole number"),
    "router:\n  port: 70000\n": (2, "router.port: got 70000, expected 0 to 65535"),
    "router:\n  mode: shove\n": (2, "router.mode: invalid choice: 'shove'"),
    "router:\n  only_mode: yes\n": (2, "router.only_mode: got 'yes', expected true or false"),
    "router:\n  port: [1, 2]\n": (2, "router.port: got a list of 2, expected one value"),
    "router:\n  port:\n  host: x\n": (2, "router.port: no value"),
    "router:\n  port: null\n": (2, "router.port: no value"),
    "router:\n  port: 1\n  port: 2\n": (3, "router.port: given before, in line 2"),
    "router:\n  port: 1\n  registry-port: 2\n  registry_port: 2\n": (4, "registry_port: given before, in line 3"),
    "router:\n  port: 1\nrouter:\n  host: x\n": (3, "given before, in line 1"),
    "routr:\n  port: 1\n": (1, "routr: unknown section, did you mean router?"),
    "port: 1\n": (1, "where a section such as router: stands alone"),
    "  port: 1\n": (1, "got 'port: 1' where a section such as router: stands alone"),
    "router:\n\tport: 1\n": (2, "indent with spaces"),
    "router:\n  port: 1\n    host: x\n": (3, "got 'host: x': mapping values are not allowed here; indent with spaces"),
    "router:\n  port: {a: 1}\n": (2, "router.port: maps have no maps"),
    "router:\n  name: |\n    a\n": (2, "in one line"),
    "router:\n  name: a\n---\nup:\n": (3, "found another document"),
    "router:\n  port: &a 1\n": (2, "an anchor or a tag; expected a text, a number or [a, list]"),
    "router:\n  name: a: b\n": (2, "quote it"),
    "router:\n  name: 'a\n": (2, "close quotes"),
    "router:\n  prefill_url: [http://a:1\n": (2, "close quotes and brackets"),
    "router:\n  - http://a:1\n": (1, "got 'router: a list' where a section"),
    'router:\n  name: "a\\ud800"\n': (2, "no character"),
    "router:\n  name: a\x07\n": (2, "a control character"),
    "hello\n": (1, "got 'hello', expected NAME: VALUE"),
    "router:\n  keys: k\n  own_registry: true\n": (3, "router.own_registry: there is one here already"),
    "up:\n  model: x\n": (2, "up.model: not an option of the embedded engine"),
    "up:\n  lease_s: 0.000001\n": (2, "up.lease_s: got 1e-06, expected seconds"),
    "worker:\n  name: p0\n  role: prefill\n  keys: k\n  registry: here\n": (
        5,
        "worker.registry: got 'here', expected an",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("text", WRONG, ids=lambda text: text.replace("\n", "|"))
    def test_a_mistake_is_told_by_file_line_and_key(self, text: str, file: Any, capsys: Any) -> None:
        path = file(text)
        line, said = WRONG[text]
        status, out, err = call(capsys, "config", "--check", path, "--json")
        found = json.loads(out)
        assert (status, err, found["ok"]) == (1, "", False)
        assert [each["line"] for each in found["problems"]] == [line]
        status, out, _ = call(capsys, "config", "--check", path)
        assert status == 1 and f"{path}:{line}: " in out and said in out

    def test_a_command_that_would_start_says_the_first_mistake_and_starts_nothing(self, file: Any, capsys: Any) -> None:
        path = file("router:\n  prot: 1\n  host: x\n  modes: y\n")
        status, out, err = call(capsys, "router", "--config", path)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"{path}:2: router.prot: unknown key, did you mean port?, and 1 more" in err
        assert f"see: kvbaton config --check {path}" in err

    def test_a_bad_variable_is_told_by_its_name(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setenv("KVBATON_STORE__BYTES", "lots")
        status, _, err = call(capsys, "store", "--keys", "k")
        assert status == 2 and err.startswith("kvbaton store: KVBATON_STORE__BYTES: 'lots' is not a size")
        monkeypatch.setenv("KVBATON_STORE__BITES", "1")
        status, _, err = call(capsys, "store", "--keys", "k")
        assert status == 2 and "KVBATON_STORE__BITES: unknown key, did you mean bytes?" in err

    def test_one_that_a_flag_outranks_is_refused_all_the_same(self, file: Any) -> None:
        with pytest.raises(CommandError, match=r":2: router\.port: got 'eight'"):
            parsed("router", "--config", file("router:\n  port: eight\n"), "--port", "8000")

    def test_a_check_after_parsing_names_the_place_too(self, file: Any, capsys: Any) -> None:
        path = file("router:\n  plain_discovery: 10.0.0.1:9\n")
        status, _, err = call(capsys, "router", "--config", path)
        assert status == 2 and f"{path}:2: plain_discovery: 10.0.0.1 is not loopback" in err

    def test_what_is_left_to_flags_keeps_nothing_from_being_checked(self, file: Any, capsys: Any) -> None:
        path = file("worker:\n  keys: k\n  registry: nonsense\n")
        status, out, _ = call(capsys, "config", "--check", path)
        assert status == 1 and f"{path}:3: worker.registry: got 'nonsense', expected an endpoint" in out
        assert call(capsys, "config", "--check", file("worker:\n  registry: tcp://127.0.0.1:7700\n"))[0] == 0

    def test_what_is_no_file_of_settings(self, tmp_path: Path, capsys: Any) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "huge").write_bytes(b"#" * (FILE_BYTES_MAX + 1))
        for name, said in (("pipe", "not a regular file"), ("huge", "larger than"), ("gone", "No such file")):
            status, out, err = call(capsys, "config", "--check", str(tmp_path / name))
            assert (status, out) == (2, "") and said in err and str(tmp_path / name) in err
        (tmp_path / "latin").write_bytes(b"router:\n  name: \xe9\n")
        assert [each.line for each in read(str(tmp_path / "latin")).problems] == [2]

    def test_everything_is_bounded(self) -> None:
        assert len(parse("f", "router:\n" + "  1: x\n" * 1000).problems) == PROBLEMS_MAX
        many = parse("f", "router:\n  prefill_url:\n" + "    - http://a:1\n" * (ITEMS_MAX + 5))
        assert many.problems and all(len(entry.texts) <= ITEMS_MAX for entry in many.entries)
        assert parse("f", f"router:\n  prefill_url: [{'a, ' * (ITEMS_MAX + 1)}]\n").problems
        assert parse("f", "router:\n  prefill_url: " + "[" * 5000).problems


class TestCheck:
    def test_a_good_file_is_shown_with_the_place_of_each_value(self, file: Any, capsys: Any, monkeypatch: Any) -> None:
        path = file(
            "store:\n  keys: keys\n  bytes: 1GiB\nrouter:\n  keys: keys\n  api_key: [hidden-key]\n"
            "worker:\n  role: decode\n"
        )
        monkeypatch.setenv("KVBATON_STORE__PORT", "9")
        status, out, err = call(capsys, "config", "--check", path)
        assert (status, err) == (0, "") and "hidden-key" not in out and "no mistakes" in out
        assert f"{path}:3" in out and "KVBATON_STORE__PORT" in out and "worker also needs name, registry" in out
        monkeypatch.setenv("KVBATON_STORE__PORT", "9")
        status, out, _ = call(capsys, "config", "--check", path, "--json")
        found = json.loads(out)
        assert (status, found["ok"], found["needs"]) == (0, True, {"worker": ["name", "registry"]})
        assert {"section": "store", "key": "bytes", "value": 1 << 30, "from": "file", "at": f"{path}:3"} in found[
            "settings"
        ]
        assert "hidden-key" not in out

    def test_every_flag_that_a_reader_sees_is_a_setting(self, capsys: Any) -> None:
        status, out, _ = call(capsys, "config", "--list", "--json")
        listed = {(row["section"], row["flag"]) for row in json.loads(out)["settings"]}
        assert status == 0 and ("router", "--registry-port") in listed and ("worker", "--http-access") in listed
        for command in layers.CONFIGURED:
            one = layers.below(cli.build_parser(command, cli.module_of(command)), command)
            seen = {action.option_strings[0] for action in one._actions if action.help != argparse.SUPPRESS}
            assert seen - {flag for section, flag in listed if section == command} <= {"-h", "--config", "--check"}


class TestYaml:
    TEXTS: Mapping[str, Mapping[str, Mapping[str, str | list[str]]]] = {
        "---\nrouter:\n  name: a b  # c\n  keys: ~/keys\n  prefill_url:\n  - http://a:1\n  - 'it''s'\n": {
            "router": {"name": "a b", "keys": "~/keys", "prefill_url": ["http://a:1", "it's"]}
        },
        'up:\n    host: "a # b \\u00e9"\n    model: "[x]"\n\nstore:\n    disk: a#b\n    bytes: 1GiB # 2\n': {
            "up": {"host": "a # b é", "model": "[x]"}, "store": {"disk": "a#b", "bytes": "1GiB"},
        },
        "router:\n  allow_origin: [https://a.example, 'b, c', \"d\", ]\n  empty: ''\n  decode_url: [ x ]\n": {
            "router": {"allow_origin": ["https://a.example", "b, c", "d"], "empty": "", "decode_url": ["x"]}
        },
        "up:\r\n  host: ::1\r\n  encrypt: on\r\n  drain_s: 1e3\r\n  seed: 007\r\nrouter:\n": {
            "up": {"host": "::1", "encrypt": "on", "drain_s": "1e3", "seed": "007"}, "router": {},
        },
    }  # fmt: skip

    @pytest.mark.parametrize("text", TEXTS)
    def test_every_value_is_the_text_as_it_was_written(self, text: str) -> None:
        file = parse("f", text)
        assert not file.problems
        found: dict[str, dict[str, str | list[str]]] = {name: {} for _, name in file.sections}
        for entry in file.entries:
            found[entry.section][entry.key] = list(entry.texts) if entry.is_list else entry.texts[0]
        assert found == self.TEXTS[text]

    @settings(max_examples=300, deadline=None)
    @given(st.text(alphabet=st.sampled_from(list("abU9:#'\"[],-{}&*!|>~%@`\\ \t\n\x00é")), max_size=60))
    def test_any_text_is_read_or_refused_by_its_line(self, text: str) -> None:
        file = parse("f", f"router:\n  {text}\n")
        lines = text.count("\n") + 3
        assert all(1 <= problem.line <= lines for problem in file.problems)
        assert all(entry.texts or entry.is_list for entry in file.entries)
