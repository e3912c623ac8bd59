"""The dashboard as Grafana wants it; what it asks is tested against a real Prometheus (tests/observe/prometheus)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE: dict[str, Any] = json.loads((Path(__file__).parents[3] / "deploy" / "grafana" / "kvbaton.json").read_text())
PANELS: list[dict[str, Any]] = PAGE["panels"]


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_rows_are_those_that_an_operator_looks_for() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == [
        "Overview", "Latency, tokens and queues", "Stages of a handoff, on D", "Leases and pins", "Bytes",
        "Failures and refusals", "Router", "Shared store", "Processes",
    ]  # fmt: skip


def test_everything_asks_the_chosen_prometheus_and_only_known_variables() -> None:
    variables = {each["name"] for each in PAGE["templating"]["list"]}
    assert variables == {"datasource", "router", "worker"}
    for panel in PANELS:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}" and target["expr"] and target["legendFormat"]
    assert PAGE["links"][0]["url"] == "http://${router}/dashboard"


def test_quantiles_show_exemplars() -> None:
    targets = [target for panel in PANELS for target in panel.get("targets", ())]
    assert all(target["exemplar"] for target in targets if target["expr"].startswith("histogram_quantile"))
