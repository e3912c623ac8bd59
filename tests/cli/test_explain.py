"""`kvbaton explain`, and its catalogue held to the sources: what can be said is explained, and nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvbaton.cli.main import main
from kvbaton.observe.codes import findings, logs, reasons
from kvbaton.observe.codes.code_catalogue import CATALOGUE, close, every, find
from kvbaton.observe.codes.entry import CodeKind, Severity, Who
from kvbaton.observe.codes.reasons import ADVICE, MISSED, PLANNED
from kvbaton.observe.metrics.metric_names import BY_NAME
from kvbaton.protocol.errors import MEANING, Reason
from tests.tool_modules import tool_module

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "kvbaton"
MORI = ROOT / "packages" / "kvbaton-mori" / "src"
NOT_THE_PRODUCT = {"chaos", "sim", "bench", "testing", "conformance"}
LEVELS = {"warning", "error", "exception", "critical"}
METRIC = re.compile(r"\bkvbaton_[a-z_]+")
CODE = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)*)\] ")


def modules(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The product's sources that have one of these words in them: to parse all of them takes a while."""
    for path in sorted([*SOURCES.rglob("*.py"), *MORI.rglob("*.py")]):
        if path.is_relative_to(MORI) or not NOT_THE_PRODUCT & set(path.relative_to(SOURCES).parts):
            text = path.read_text()
            if any(word in text for word in words):
                yield path, ast.parse(text)


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` as a text; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


# --- the command


@pytest.mark.parametrize(("word", "said"), [("400", "invalid_value"), ("404", "model_not_found"), ("418", "log")])
def test_every_status_of_an_error_leads_somewhere(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{word} (HTTP status of a worker's refusal)\n") and said in text


def test_a_reason_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lease_expired"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("lease_expired (failure reason of a handoff)\n  The lease expired before D could read.\n")
    for title in ("who must act: you, the operator", "likely causes:", "what to do:", "kvbaton inspect --failed"):
        assert title in text


def test_a_word_with_two_meanings_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "draining", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["word"] == "draining" and [each["kind"] for each in told["entries"]] == ["reason", "api"]


@pytest.mark.parametrize("word", ["[no-kv]", "NO_KV", "no-kv"])
def test_a_word_is_found_however_it_is_written(word: str) -> None:
    assert [entry.code for entry in find(word)] == ["no-kv"]


def test_without_a_word_all_are_listed_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == [kind.value for kind in CodeKind] and len(told["reason"]) == len(Reason)
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {entry.code}" in text for entry in every()) and text.endswith("next: kvbaton explain WORD\n")


@pytest.mark.parametrize(
    ("word", "hint"), [("lease_expird", "did you mean lease_expired?"), ("zzzzzzzz", "kvbaton explain lists all")]
)
def test_an_unknown_word_is_one_line_with_what_may_be_meant(
    capsys: pytest.CaptureFixture[str], word: str, hint: str
) -> None:
    assert main(["explain", word]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and repr(word) in error and hint in error


# --- the catalogue


def test_every_reason_has_advice_and_its_blame() -> None:
    assert set(ADVICE) == set(Reason) == {Reason(entry.code) for entry in CATALOGUE[CodeKind.REASON]}
    for entry in CATALOGUE[CodeKind.REASON]:
        assert entry.who.value == MEANING[Reason(entry.code)][0].value and entry.causes


def test_every_word_of_d_alone_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """What metrics, doctor, inspect and the dashboard call it: with its next step where something is wrong."""
    counted = [BY_NAME[f"kvbaton_{name}_total"].labels[0].values for name in ("alone_tokens", "router_alone")]
    labels = {word for words in counted for word in words}
    assert labels >= {*MISSED, "fallback"} and [word for word in labels | set(PLANNED) if not find(word)] == []
    for word, (means, do) in MISSED.items():
        assert main(["explain", word]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"{word} (why D computes a prompt itself)" in text and means in text and do in text
    assert {entry.code for entry in CATALOGUE[CodeKind.ALONE] if entry.who is Who.NOBODY} == set(PLANNED)


def test_a_code_has_one_entry_and_every_entry_a_next_step() -> None:
    assert [code for code, count in Counter((e.kind, e.code) for e in every()).items() if count > 1] == []
    spoken = Counter(
        entry.code.replace("-", "_") for kind in (CodeKind.LOG, CodeKind.FINDING) for entry in CATALOGUE[kind]
    )
    assert [code for code, count in spoken.items() if count > 1] == []  # a log line and a finding never share one
    for entry in every():
        assert entry.do and all(entry.do) and entry.means.endswith("."), entry.code
        assert (entry.severity is not None) == (entry.kind is CodeKind.FINDING), entry.code
        assert (entry.who is Who.NOBODY) == (entry.severity is Severity.NOTE) or entry.kind is not CodeKind.FINDING


def test_the_metrics_that_advice_names_exist() -> None:
    named = {name for entry in every() for text in (*entry.look, *entry.do) for name in METRIC.findall(text)}
    assert len(named) >= 8 and sorted(named - set(BY_NAME)) == []


def test_close_words() -> None:
    assert close("port-takn") == ["port-taken"] and close("qqqq") == []


# --- log lines


LOGGERS = {"log", "_log", "logger"}


def log_calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Every call that may log a warning or worse, with its format text; "" where that cannot be read."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    texts: dict[str, str] = {}
    aliases: set[str] = set()
    for node in assigned:
        names = [dotted(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {f"{name}:{node.lineno}": node.value.value for name in names}
        elif node.value is not None and is_logging(node.value):
            aliases |= set(names)  # self.say = log.warning
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        if dotted(call.func) in aliases or is_logging(call.func):
            yield call, said(call.args[0], call.lineno, texts)
        elif dotted(call.func) in {f"{name}.log" for name in LOGGERS} and may_warn(call.args[0]):
            yield call, said(call.args[1], call.lineno, texts)


def may_warn(level: ast.expr) -> bool:
    return dotted(level) not in {"logging.INFO", "logging.DEBUG"}


def is_logging(function: ast.expr) -> bool:
    return dotted(function) in {f"{name}.{level}" for name in LOGGERS for level in LEVELS}


def said(text: ast.expr, line: int, texts: dict[str, str]) -> str:
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return text.value
    if isinstance(text, ast.Name):  # assigned a line or a few before
        near = [key for key in texts if key.partition(":")[0] == text.id and 0 < line - int(key.partition(":")[2]) < 4]
        return texts[near[-1]] if near else ""
    return ""


def news_codes(tree: ast.Module) -> Iterator[str]:
    """Codes of INFO lines, which need none."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and dotted(call.func) == "log.info" and isinstance(call.args[0], ast.Constant):
            code = CODE.match(str(call.args[0].value))
            if code is not None:
                yield code[1]


def test_every_warning_of_the_product_begins_with_a_code_and_every_code_is_used() -> None:
    known = {entry.code for entry in logs.CODES}
    used, without = set(), []
    for path, tree in modules("log.", "_log.", "logger."):
        news = set(news_codes(tree))
        assert news <= known, path
        used |= news
        for call, text in log_calls(tree):
            code = CODE.match(text)
            if code is None or code[1] not in known:
                without.append(
                    f"{path.relative_to(ROOT)}:{call.lineno}: {text!r}; begin it with a code of observe/codes/logs.py"
                )
            else:
                used.add(code[1])
    assert without == []
    assert sorted(known - used) == []


def test_nobody_logs_by_another_name() -> None:
    """So that the test above sees all of it."""
    other = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in modules("logging.", "warnings.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {*(f"logging.{level}" for level in LEVELS), "warnings.warn"}
    ]
    assert other == []


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('log.warning("[a-b] %s", x)', ["[a-b] %s"]),
        ("log.error(text)", [""]),
        ('said = "[x] y"\nlog.log(logging.ERROR, said)', ["[x] y"]),
        ('log.info("all is well")', []),
        ('log.log(logging.INFO, "all is well")', []),
        ('log.log(logging.WARNING if x else logging.INFO, "[x] y")', ["[x] y"]),
        ('self.say: F = log.warning\nself.say("[x] y")', ["[x] y"]),
        ('log.warning(f"[x] {y}")', [""]),
    ],
)
def test_the_reader_of_log_calls_sees_what_there_is(source: str, texts: list[str]) -> None:
    assert [text for _, text in log_calls(ast.parse(source))] == texts


# --- error codes of HTTP answers


def api_codes() -> dict[str, str]:
    """Every code that a source can put into an answer (a pattern where it is made of parts), and where."""
    trees = dict(modules("ApiError", ".failed(", "unavailable("))
    constants = {
        target.id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for code in codes_in(node, constants, tree):
                found[code] = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
    return found


def codes_in(node: ast.AST, constants: dict[str, str], tree: ast.Module) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # def unavailable(message, code="no_pair")
        named = [*node.args.args[len(node.args.args) - len(node.args.defaults) :], *node.args.kwonlyargs]
        for argument, default in zip(named, [*node.args.defaults, *node.args.kw_defaults], strict=True):
            if argument.arg == "code" and default is not None:
                yield from told(default, constants, tree)
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
    if name in {"ApiError", "replace"}:
        for keyword in node.keywords:
            if keyword.arg == "code":
                yield from told(keyword.value, constants, tree)
    position = {"failed": 2, "unavailable": 1}.get(name)
    if position is not None and len(node.args) > position:
        yield from told(node.args[position], constants, tree)


def told(value: ast.expr, constants: dict[str, str], tree: ast.Module) -> Iterator[str]:
    if isinstance(value, ast.Constant):
        if isinstance(value.value, str):
            yield value.value
    elif isinstance(value, ast.BoolOp):
        for each in value.values:
            yield from told(each, constants, tree)
    elif isinstance(value, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else "[a-z]+" for p in value.values)
    elif isinstance(value, ast.Name) and value.id in constants:
        yield constants[value.id]
    elif isinstance(value, ast.Name):  # code = {404: "not_found"}.get(status)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(dotted(t) == value.id for t in node.targets):
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Dict):
                        yield from (v.value for v in part.values if isinstance(v, ast.Constant))  # type: ignore[misc]


def test_every_error_code_of_an_answer_is_explained_and_no_other() -> None:
    said_at = api_codes()
    known = {entry.code for entry in reasons.CODES}
    explained = known | {str(reason) for reason in Reason}
    unexplained = {code: at for code, at in said_at.items() if not any(re.fullmatch(code, each) for each in explained)}
    assert unexplained == {}
    unused = [code for code in known if not any(re.fullmatch(pattern, code) for pattern in said_at)]
    assert unused == []
    assert {"no_pair", "worker_failed", "not_the_router", "not_found", "[a-z]+_timeout"} <= set(said_at)


# --- findings and pages


def test_every_finding_of_doctor_is_in_the_catalogue_and_every_one_can_be_found() -> None:
    said_codes = set()
    for path in [SOURCES / "cli" / "doctor.py", *SOURCES.glob("doctor/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in findings.SEVERITY:
                said_codes.add(node.value)
    assert sorted(set(findings.SEVERITY) - said_codes) == []


def docs_tool() -> ModuleType:
    return tool_module("docs/reasons_docs")


def test_the_pages_are_up_to_date() -> None:
    tool = docs_tool()
    for path, text in tool.pages().items():
        assert path.read_text() == text, f"{path} is out of date; run: python tools/docs/reasons_docs.py"
