"""Writes deploy/grafana/kvbaton.json: Grafana's dashboard of a cluster, one for embedded workers and for vLLM.

    python tools/docs/grafana_dashboard.py

A test compares the file with what this makes, and asks a real Prometheus every question that is in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "deploy" / "grafana" / "kvbaton.json"
SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WORKER = 'instance=~"$worker"'
ROUTER = 'instance=~"$router"'
WIDTH, HEIGHT = 24, 8
QUIET = "delivered|aborted|cancelled|discarded"
OF_PEERS = 'reason=~"plain|full|bad_span|not_lent|bad_message"'
OF_STRANGERS = 'reason!~"plain|full|bad_span|not_lent|bad_message"'


class Panel(NamedTuple):
    title: str
    queries: Sequence[tuple[str, str]]  # expression, legend
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    width: int = 8


def _quantiles(metric: str, where: str, by: str, *quantiles: float) -> list[tuple[str, str]]:
    return [
        (
            f"histogram_quantile({q:g}, sum by (le, {by}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))",
            f"p{q * 100:g} {{{{{by}}}}}",
        )
        for q in quantiles
    ]


ENDS = f"sum(rate(kvbaton_ends_total{{{WORKER}}}[$__rate_interval]))"
FAILED = f'kvbaton_ends_total{{{WORKER}, end!~"{QUIET}"}}'
HANDOVER = f"sum by (mode) (rate(kvbaton_router_handover_seconds_sum{{{ROUTER}}}[$__rate_interval]))"
FIRST_BYTE = f'sum by (mode) (rate(kvbaton_router_first_byte_seconds_sum{{{ROUTER}, mode!="alone"}}[$__rate_interval]))'

ROWS: dict[str, Sequence[Panel]] = {
    "Overview": (
        Panel("Handoffs per second", [(ENDS, "all")], "ops", "stat", width=4),
        Panel("Failed share", [(f"sum(rate({FAILED}[$__rate_interval])) / {ENDS}", "failed")], "percentunit", "stat",
              "0 without requests; docs/alerts.md#kvbatonhandoffsfail", 4),
        Panel("Available pairs", [(f"max by (mode) (kvbaton_router_pairs{{{ROUTER}}})", "{{mode}}")], "short",
              "stat", width=4),
        Panel("Time to first byte", _quantiles("kvbaton_router_first_byte_seconds", ROUTER, "mode", 0.5, 0.95), "s",
              about="Of streamed responses, at the router.", width=6),
        Panel("Transfer share of TTFT", [(f"{HANDOVER} / {FIRST_BYTE}", "{{mode}}")], "percentunit",
              about="Time from P's response to D's first byte, as a share of the time to first byte.", width=6),
        Panel("Handoffs by mode, transport and end",
              [(f"sum by (mode, transport, end) (rate(kvbaton_handoffs_total{{{WORKER}}}[$__rate_interval]))",
                "{{mode}} {{transport}} {{end}}")], "ops", width=12),
        Panel("Where TTFT goes", [
            (f"sum by (mode) (rate(kvbaton_router_prefill_seconds_sum{{{ROUTER}}}[$__rate_interval])) / "
             f"sum by (mode) (rate(kvbaton_router_prefill_seconds_count{{{ROUTER}}}[$__rate_interval]))",
             "prefill, {{mode}}"),
            (f"{HANDOVER} / sum by (mode) (rate(kvbaton_router_handover_seconds_count{{{ROUTER}}}[$__rate_interval]))",
             "handover, {{mode}}"),
        ], "s", about="Means.", width=12),
    ),
    "Latency, tokens and queues": (
        Panel("End to end", _quantiles("kvbaton_router_request_seconds", ROUTER, "mode", 0.5, 0.95), "s",
              about="From a request to the end of its answer, at the router."),
        Panel("Between tokens (ITL)", _quantiles("kvbaton_router_inter_token_seconds", ROUTER, "mode", 0.5, 0.99), "s",
              about="Between two chunks of a streamed answer, at the router."),
        Panel("Tokens per second",
              [(f"sum(rate(kvbaton_router_prompt_tokens_total{{{ROUTER}}}[$__rate_interval]))", "prompt"),
               (f"sum(rate(kvbaton_router_output_tokens_total{{{ROUTER}}}[$__rate_interval]))", "output")], "short",
              about="Prompt tokens are estimated where they come as text."),
        Panel("Queues",
              [(f'sum by (role, worker, state) (kvbaton_router_worker_requests{{{ROUTER}, state!="running"}})',
                "{{role}} {{worker}} {{state}}")], about="Requests that wait in each worker's engine."),
        Panel("Tokens under way, by worker",
              [(f"sum by (role, worker) (kvbaton_router_worker_tokens{{{ROUTER}}})", "{{role}} {{worker}}")]),
        Panel("Failed requests, by worker",
              [(f"sum by (role, worker) (rate(kvbaton_router_worker_failures_total{{{ROUTER}}}[$__rate_interval])) > 0",
                "{{role}} {{worker}}")], "ops"),
    ),
    "Stages of a handoff, on D": (
        Panel("Stages, median", _quantiles("kvbaton_stage_seconds", WORKER, "stage", 0.5), "s",
              about="Exemplars carry a transfer id: kvbaton inspect TRANSFER_ID"),
        Panel("Stages, 95 %", _quantiles("kvbaton_stage_seconds", WORKER, "stage", 0.95), "s"),
        Panel("Whole handoffs", _quantiles("kvbaton_handoff_seconds", WORKER, "mode", 0.5, 0.99), "s"),
        Panel("Copies", [(f'sum by (le) (increase(kvbaton_stage_seconds_bucket{{{WORKER}, stage="copy"}}'
                          "[$__rate_interval]))", "{{le}}")], "s", "heatmap", width=12),
        Panel("Waiting for blocks on D", [(f'sum by (le) (increase(kvbaton_stage_seconds_bucket{{{WORKER}, '
                                         'stage="queue"}[$__rate_interval]))', "{{le}}")], "s", "heatmap", width=12),
    ),
    "Leases and pins": (
        Panel("Pinned blocks", [(f"kvbaton_pinned_blocks{{{WORKER}}}", "{{instance}}"),
                                (f"kvbaton_store_pins{{{WORKER}}}", "{{instance}} for the store")]),
        Panel("Leases held, prompts in transfer", [(f"kvbaton_leases_held{{{WORKER}}}", "leases {{instance}}"),
                                                    (f"kvbaton_intakes{{{WORKER}}}", "in transfer to {{instance}}"),
                                                    (f"kvbaton_claims_parked{{{WORKER}}}", "parked {{instance}}")]),
        Panel("Oldest lease, of max_hold_s",
              [(f"kvbaton_oldest_lease_seconds{{{WORKER}}} / kvbaton_lease_hold_max_seconds{{{WORKER}}}",
                "{{instance}}")], "percentunit", about="docs/alerts.md#kvbatonpinsnearexpiry"),
        Panel("Leases granted, expired, discarded",
              [(f"sum(rate(kvbaton_leases_total{{{WORKER}}}[$__rate_interval]))", "granted"),
               (f"sum(rate(kvbaton_leases_expired_total{{{WORKER}}}[$__rate_interval]))", "expired"),
               (f"sum(rate(kvbaton_leases_discarded_total{{{WORKER}}}[$__rate_interval]))", "discarded")], "ops"),
        Panel("Lease hold time", _quantiles("kvbaton_lease_held_seconds", WORKER, "mode", 0.5, 0.99), "s"),
        Panel("Quarantine", [(f"kvbaton_quarantined_blocks{{{WORKER}}} / kvbaton_quarantine_max_blocks{{{WORKER}}}",
                              "{{instance}}")], "percentunit"),
    ),
    "Bytes": (
        Panel("Bytes per second, by transport",
              [(f"sum by (transport) (rate(kvbaton_handoff_bytes_sum{{{WORKER}}}[$__rate_interval]))",
                "{{transport}}")], "Bps"),
        Panel("Bytes per second, by worker",
              [(f"sum by (instance) (rate(kvbaton_bytes_total{{{WORKER}}}[$__rate_interval]))", "{{instance}}")],
              "Bps"),
        Panel("Size of a handoff", _quantiles("kvbaton_handoff_bytes", WORKER, "transport", 0.5, 0.99), "bytes"),
    ),
    "Failures and refusals": (
        Panel("Failed handoffs by reason", [(f"sum by (end) (rate({FAILED}[$__rate_interval])) > 0", "{{end}}")],
              "ops", about="kvbaton explain REASON; kvbaton inspect --failed"),
        Panel("Prompt tokens that D computed although a P should have",
              [(f'sum by (instance) (rate(kvbaton_prompt_tokens_total{{{WORKER}, source="alone"}}[$__rate_interval])) '
                f"/ sum by (instance) (rate(kvbaton_prompt_tokens_total{{{WORKER}}}[$__rate_interval]))",
                "{{instance}}")], "percentunit",
              about="Of all prompt tokens at D. kvbaton doctor --router URL names the reason."),
        Panel("The same by reason",
              [(f"sum by (reason) (rate(kvbaton_alone_tokens_total{{{WORKER}}}[$__rate_interval])) > 0",
                "{{reason}}")], "ops", about="Tokens per second."),
        Panel("Room to pin at P",
              [(f"kvbaton_pin_waiting{{{WORKER}}}", "waiting: {{instance}}"),
               (f"rate(kvbaton_pin_refused_total{{{WORKER}}}[$__rate_interval])", "refused/s: {{instance}}"),
               (f"kvbaton_full{{{WORKER}}}", "full: {{instance}}"),
               (f"sum(rate(kvbaton_router_passed_full_total{{{ROUTER}}}[$__rate_interval]))", "passed over/s")]),
        Panel("Abandoned leases and refused claims",
              [(f"sum by (reason) (rate(kvbaton_abandoned_total{{{WORKER}}}[$__rate_interval]))",
                "abandoned: {{reason}}"),
               (f"sum by (reason) (rate(kvbaton_claims_refused_total{{{WORKER}}}[$__rate_interval]))",
                "claim: {{reason}}")], "ops"),
        Panel("Stale commits, faults, repeated messages",
              [(f"sum(rate(kvbaton_commits_stale_total{{{WORKER}}}[$__rate_interval]))", "stale commits"),
               (f"sum(rate(kvbaton_faults_total{{{WORKER}}}[$__rate_interval]))", "faults"),
               (f"sum(rate(kvbaton_messages_repeated_total{{{WORKER}}}[$__rate_interval]))", "messages repeated")],
              "ops"),
        Panel("Refused peers",
              [(f"sum by (reason) (rate(kvbaton_hello_refused_total{{{WORKER}}}[$__rate_interval])) > 0",
                "hello: {{reason}}"),
               (f"sum by (reason) (rate(kvbaton_frames_refused_total{{{WORKER}}}[$__rate_interval])) > 0",
                "message: {{reason}}"),
               (f"sum by (what) (rate(kvbaton_over_quota_total{{{WORKER}}}[$__rate_interval])) > 0",
                "over quota: {{what}}"),
               (f"sum by (transport, reason) (rate(kvbaton_data_refused_total{{{WORKER}, {OF_PEERS}}}"
                "[$__rate_interval])) > 0", "{{transport}}: {{reason}}")], "ops"),
        Panel("Unauthenticated peers at control and data ports",
              [("sum by (instance) (rate(kvbaton_connections_total[$__rate_interval])) - "
                "sum by (instance) (rate(kvbaton_connections_admitted_total[$__rate_interval]))",
                "no proof: {{instance}}"),
               ("sum by (instance) (rate(kvbaton_connections_refused_total[$__rate_interval]))",
                "unknown key: {{instance}}"),
               (f"sum by (transport, reason) (rate(kvbaton_data_refused_total{{{WORKER}, {OF_STRANGERS}}}"
                "[$__rate_interval])) > 0", "{{transport}}: {{reason}}")], "ops",
              about="All of these were refused."),
        Panel("Pairings by transport",
              [(f"sum by (transport) (kvbaton_links_total{{{WORKER}}})", "made: {{transport}}"),
               (f"sum by (transport) (kvbaton_planes_given_up_total{{{WORKER}}})", "given up: {{transport}}")]),
    ),
    "Router": (
        Panel("Requests by outcome",
              [(f"sum by (outcome) (rate(kvbaton_router_requests_total{{{ROUTER}}}[$__rate_interval]))",
                "{{outcome}}")], "ops"),
        Panel("In flight", [(f"kvbaton_router_in_flight{{{ROUTER}}}", "{{instance}}")]),
        Panel("Attempts, retries, D alone",
              [(f"sum by (mode) (rate(kvbaton_router_tries_total{{{ROUTER}}}[$__rate_interval]))", "attempt {{mode}}"),
               (f"sum by (side) (rate(kvbaton_router_retries_total{{{ROUTER}}}[$__rate_interval]))",
                "retry after {{side}}"),
               (f"sum by (reason) (rate(kvbaton_router_alone_total{{{ROUTER}}}[$__rate_interval]))",
                "alone: {{reason}}")], "ops"),
        Panel("Failed worker requests",
              [(f"sum by (side, code) (rate(kvbaton_router_leg_failures_total{{{ROUTER}}}[$__rate_interval]))",
                "{{side}} {{code}}")], "ops"),
        Panel("Workers", [(f"sum by (role, state) (kvbaton_router_workers{{{ROUTER}}})", "{{role}} {{state}}")]),
        Panel("Breakers opened, tickets discarded, worker requests dropped",
              [(f"sum(increase(kvbaton_router_breakers_opened_total{{{ROUTER}}}[$__rate_interval]))", "breakers"),
               (f"sum(increase(kvbaton_router_tickets_discarded_total{{{ROUTER}}}[$__rate_interval]))", "tickets"),
               (f"sum(increase(kvbaton_router_legs_dropped_total{{{ROUTER}}}[$__rate_interval]))", "worker requests")]),
    ),
    "Shared store": (
        Panel("Lookups, loads, puts",
              [(f"sum(rate(kvbaton_store_{what}_total{{{WORKER}}}[$__rate_interval]))", what)
               for what in ("lookups", "gets", "puts", "errors")], "ops"),
        Panel("Blocks loaded",
              [(f"sum by (instance) (rate(kvbaton_store_hits_blocks_total{{{WORKER}}}[$__rate_interval]))",
                "{{instance}}")], "ops"),
        Panel("Failed handoffs served by the store",
              [(f"sum(rate(kvbaton_second_source_total{{{WORKER}}}[$__rate_interval]))", "second source")], "ops"),
    ),
    "Processes": (
        Panel("Versions", [("count by (version, component) (kvbaton_build_info)", "{{component}} {{version}}")],
              kind="stat", width=12),
        Panel("Up since", [("1000 * process_start_time_seconds and on (job, instance) kvbaton_build_info",
                            "{{instance}}")],
              "dateTimeFromNow", "stat", width=12),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}})  # fmt: skip
        x, y = 0, y + 1
        for panel in members:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            place = {"h": HEIGHT, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, place))
            x += panel.width
        y += HEIGHT
    return {
        "uid": "kvbaton",
        "title": "kvbaton",
        "description": "Handoffs of KV caches: router, prefill and decode workers. Names: docs/metrics.md.",
        "tags": ["kvbaton"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "title": "Router dashboard",
                "type": "link",
                "icon": "external link",
                "targetBlank": True,
                "url": "http://${router}/dashboard",
                "tooltip": "The topology, handoffs as they move, the last failures",
                "tags": [],
                "asDropdown": False,
                "includeVars": False,
                "keepTime": False,
            },
        ],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                    "includeAll": False,
                    "multi": False,
                    "options": [],
                    "refresh": 1,
                    "regex": "",
                },
                _variable(
                    "router", "Router", 'label_values(kvbaton_build_info{component="router"}, instance)', many=False
                ),
                _variable(
                    "worker", "Worker", 'label_values(kvbaton_build_info{component!="router"}, instance)', many=True
                ),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, query: str, *, many: bool) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "hide": 0, "regex": "", "options": [],
        "current": {}, "includeAll": many, "multi": many, "allValue": ".*" if many else None,
    }  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    heat = panel.kind == "heatmap"
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True,
         "exemplar": "_bucket" in expr and not heat, "format": "heatmap" if heat else "time_series"}
        for index, (expr, legend) in enumerate(panel.queries)
    ]  # fmt: skip
    found: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
    if heat:
        found["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme"}}
    return found


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"{PAGE.name}: {sum(len(panels) for panels in ROWS.values())} panels")
