"""The rules that are shipped: promtool accepts them, and each alert fires when it should and only then.

Series are told as promtool reads them: `0+2x40` begins at 0 and grows by 2 with each of 40 samples, 15 s apart.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from kvbaton.observe.flight.flight_records import DELIVERED, QUIET
from kvbaton.observe.metrics.metric_names import BY_NAME, METRICS
from kvbaton.protocol.errors import Reason
from kvbaton.transports.core.transport import Cause
from tests.observe.prometheus.server import CONFIG, ROOT, RULES, alerts, promtool

AT = "20m"
D0, P0, R0 = (f'instance="{name}:8000",job="kvbaton-{name[0]}"' for name in ("d0", "p0", "router"))
Series = dict[str, str]


def counted(name: str, labels: str, step: float) -> Series:
    return {f"{name}{{{labels}}}": f"0+{step}x120"}


def stands(name: str, labels: str, value: float) -> Series:
    return {f"{name}{{{labels}}}": f"{value}+0x120"}


def moving(pins: float, leases: float, copies: float) -> Series:
    return {
        **stands("kvbaton_pinned_blocks", P0, pins),
        **counted("kvbaton_leases_total", P0, leases),
        **counted("kvbaton_copies_total", P0, copies),
    }


def ends(delivered: float, failed: float, aborted: float = 0) -> Series:
    found: Series = {}
    for end, step in (("delivered", delivered), ("transfer_timeout", failed), ("aborted", aborted)):
        found |= counted("kvbaton_ends_total", f'{D0},end="{end}"', step)
    return found


def waits(first_byte: float, handover: float, mode: str = "pull") -> Series:
    return {
        **counted("kvbaton_router_first_byte_seconds_sum", f'{R0},mode="{mode}"', first_byte),
        **counted("kvbaton_router_first_byte_seconds_sum", f'{R0},mode="alone"', 100),
        **counted("kvbaton_router_handover_seconds_sum", f'{R0},mode="{mode}"', handover),
    }


def responses(good: float, bad: float, wrong: float = 0) -> Series:
    found: Series = {}
    for status, step in (("2xx", good), ("5xx", bad), ("4xx", wrong), ("gone", 100)):
        found |= counted("kvbaton_router_responses_total", f'{R0},status="{status}"', step)
    return found


def prompts(alone: float, handed: float) -> Series:
    found: Series = {}
    for source, step in (("alone", alone), ("handoff", handed), ("cached", 0)):
        found |= counted("kvbaton_prompt_tokens_total", f'{D0},source="{source}"', step)
    return found


def lease(age: float) -> Series:
    hold = stands("kvbaton_lease_hold_max_seconds", P0, 180)
    return {**hold, **stands("kvbaton_oldest_lease_seconds", P0, age)}


def expiry(granted: float, expired: float) -> Series:
    both = counted("kvbaton_leases_total", P0, granted)
    return {**both, **counted("kvbaton_leases_expired_total", P0, expired)}


def visits(unproven: float, refused: float) -> Series:
    return {
        **counted("kvbaton_connections_total", R0, 10 + unproven),
        **counted("kvbaton_connections_admitted_total", R0, 10),
        **counted("kvbaton_connections_refused_total", R0, refused),
    }


def knocks(**steps: float) -> Series:
    """At data ports, by reason."""
    found: Series = {}
    for reason, step in steps.items():
        found |= counted("kvbaton_data_refused_total", f'{P0},transport="tcp",reason="{reason}"', step)
    return found


def quarantine(blocks: float, of: float = 4096) -> Series:
    bound = stands("kvbaton_quarantine_max_blocks", D0, of)
    return {**bound, **stands("kvbaton_quarantined_blocks", D0, blocks)}


def pairs(pull: float, push: float) -> Series:
    found = stands("kvbaton_router_pairs", f'{R0},mode="pull"', pull)
    return {**found, **stands("kvbaton_router_pairs", f'{R0},mode="push"', push)}


def histogram(name: str, **rising: float) -> Series:
    """A router's, by what each bucket grows with each sample: `b2` is le="2.0", the last is all."""
    bounds = {"b02": "0.2", "b05": "0.5", "b2": "2.0", "b5": "5.0", "all": "+Inf"}
    found = counted(f"{name}_count", f'{R0},mode="pull"', rising["all"])
    for bound, step in rising.items():
        found |= counted(f"{name}_bucket", f'{R0},mode="pull",le="{bounds[bound]}"', step)
    return found


def first_bytes(quick: float, late: float) -> Series:
    """Streams within 2 s and within 5 s, with each sample."""
    return histogram("kvbaton_router_first_byte_seconds", b2=quick, b5=quick + late, all=quick + late)


def between(quick: float, late: float) -> Series:
    return histogram("kvbaton_router_inter_token_seconds", b02=quick, b05=quick + late, all=quick + late)


def queues(*waiting: float, role: str = "prefill") -> Series:
    found: Series = {}
    for number, count in enumerate(waiting):
        labels = f'{R0},role="{role}",worker="w{number}",state="waiting"'
        found |= stands("kvbaton_router_worker_requests", labels, count)
    return {**found, **stands("kvbaton_router_worker_requests", f'{R0},role="decode",worker="d",state="running"', 99)}


def cache(free: float, full: str = "0+0x120") -> Series:
    found = {**stands("kvbaton_engine_blocks", D0, 1000), **stands("kvbaton_engine_free_blocks", D0, free)}
    return {**found, f"kvbaton_full{{{D0}}}": full}


def ended(name: str, labels: str, before: float, after: float) -> Series:
    """It grew like this for ten minutes, and since then like that."""
    return {f"{name}{{{labels}}}": f"0+{before}x40 {40 * before}+{after}x80"}


OVER: Series = {
    **ended("kvbaton_router_responses_total", f'{R0},status="5xx"', 5, 0),
    **counted("kvbaton_router_responses_total", f'{R0},status="2xx"', 10),
}
"""One in three failed for ten minutes, and for ten minutes none has."""
LATE_OVER: Series = {
    **ended("kvbaton_router_first_byte_seconds_bucket", f'{R0},mode="pull",le="2.0"', 5, 10),
    **counted("kvbaton_router_first_byte_seconds_count", f'{R0},mode="pull"', 10),
}
JUST_STARTED: Series = {
    f"kvbaton_pinned_blocks{{{P0}}}": "_x78 4+0x40",
    f"kvbaton_leases_total{{{P0}}}": "_x78 1+0x40",
    f"kvbaton_copies_total{{{P0}}}": "_x78 0+0x40",
}
"""A worker whose first samples are half a minute old: its first lease is being read."""
LEAKED: Series = {
    f"kvbaton_pinned_blocks{{{P0}}}": "0+1x40 4+0x80",
    f"kvbaton_leases_total{{{P0}}}": "0+2x40 80+0x80",
    f"kvbaton_copies_total{{{P0}}}": "0+2x40 80+0x80",
}
"""Ten minutes of work, and since then nothing but four pins."""
QUIET_NIGHT: Series = {
    f'kvbaton_router_responses_total{{{R0},status="5xx"}}': "0+0x60 1+0x60",
    f'kvbaton_router_responses_total{{{R0},status="2xx"}}': "5+0x120",
}
"""One request in a quarter of an hour, and it ends with a 5xx."""


FIRES: dict[str, list[Series]] = {
    "KvbatonPinsNearExpiry": [lease(160)],
    "KvbatonPinsLeaked": [moving(4, 0, 0), LEAKED],
    "KvbatonLeasesExpire": [expiry(10, 1), expiry(1, 1)],
    "KvbatonHandoffsFail": [ends(9, 1), ends(0, 1)],
    "KvbatonDecodeAlone": [prompts(20, 100), prompts(100, 0)],
    "KvbatonPinsRefused": [counted("kvbaton_pin_refused_total", P0, 1)],
    "KvbatonTransferShareHigh": [waits(10, 4), waits(10, 4, "push")],
    "KvbatonPeerRefused": [
        counted("kvbaton_hello_refused_total", f'{P0},reason="incompatible"', 1),
        counted("kvbaton_frames_refused_total", f'{P0},reason="bad_message"', 1),
        *(knocks(**{reason: 0.1}) for reason in ("plain", "bad_span", "bad_message")),
    ],
    "KvbatonStrangers": [
        visits(1, 0),
        visits(0, 0.1),
        *(knocks(**{reason: 0.1}) for reason in ("bad_proof", "other_user")),
        *(knocks(**{reason: 1}) for reason in ("no_proof", "bad_greeting", "crowded_out")),
        knocks(no_proof=0.3, bad_greeting=0.3),  # 12 each in ten minutes
    ],
    "KvbatonPeerFloods": [counted("kvbaton_over_quota_total", f'{P0},what="frames"', 1)],
    "KvbatonStaleCommits": [counted("kvbaton_commits_stale_total", P0, 0.1)],
    "KvbatonWorkerFaults": [counted("kvbaton_faults_total", D0, 0.1)],
    "KvbatonQuarantineNearBound": [quarantine(3000), quarantine(600, of=1024)],
    "KvbatonRouterErrors": [responses(9, 1), responses(0, 0.2)],
    "KvbatonTtftHigh": [first_bytes(9, 1), first_bytes(0, 2)],
    "KvbatonInterTokenHigh": [between(90, 10), between(0, 90)],
    "KvbatonQueueLong": [
        queues(9),
        queues(0, 30),
        queues(9, role="decode"),
        stands("vllm:num_requests_waiting", P0, 9),
    ],
    "KvbatonCacheFull": [cache(40), cache(900, "1+0x120"), stands("vllm:kv_cache_usage_perc", D0, 0.97)],
    "KvbatonErrorBurnFast": [responses(98, 2), responses(0, 1)],
    "KvbatonErrorBurnSlow": [responses(99.3, 0.7), responses(98, 2)],
    "KvbatonTtftBurnFast": [first_bytes(84, 16), first_bytes(0, 2)],
    "KvbatonTtftBurnSlow": [first_bytes(93, 7), first_bytes(84, 16)],
    "KvbatonNoPair": [pairs(0, 0)],
    "KvbatonTargetDown": [stands("up", D0, 0)],
}
IS_SILENT: dict[str, list[Series]] = {
    "KvbatonPinsNearExpiry": [lease(0), lease(140)],
    "KvbatonPinsLeaked": [moving(0, 0, 0), moving(4, 1, 0), moving(4, 0, 1), JUST_STARTED],
    "KvbatonLeasesExpire": [expiry(100, 1), expiry(0, 0)],
    "KvbatonHandoffsFail": [ends(99, 1), ends(9, 0, aborted=50), ends(0, 0)],
    "KvbatonDecodeAlone": [prompts(1, 100), prompts(0, 100), prompts(0, 0), prompts(5, 5)],
    "KvbatonPinsRefused": [stands("kvbaton_pin_refused_total", P0, 90), counted("kvbaton_pin_refused_total", P0, 0.1)],
    "KvbatonTransferShareHigh": [waits(10, 2), waits(0, 0)],
    "KvbatonPeerRefused": [
        counted("kvbaton_hello_refused_total", f'{P0},reason="incompatible"', 0),
        stands("kvbaton_frames_refused_total", f'{P0},reason="bad_message"', 7),
        stands("kvbaton_data_refused_total", f'{P0},transport="tcp",reason="bad_span"', 7),
        knocks(left=9, full=9, no_proof=9, bad_proof=9),
    ],
    "KvbatonStrangers": [visits(0, 0), visits(0.2, 0), knocks(no_proof=0.1, bad_greeting=0.1), knocks(left=9, full=9)],
    "KvbatonPeerFloods": [stands("kvbaton_over_quota_total", f'{P0},what="frames"', 3)],
    "KvbatonStaleCommits": [stands("kvbaton_commits_stale_total", P0, 9)],
    "KvbatonWorkerFaults": [stands("kvbaton_faults_total", D0, 2)],
    "KvbatonQuarantineNearBound": [quarantine(0), quarantine(2000)],
    "KvbatonRouterErrors": [responses(99, 1), responses(1, 0, wrong=99), responses(0, 0), QUIET_NIGHT],
    "KvbatonTtftHigh": [first_bytes(99, 1), first_bytes(0, 0.5), first_bytes(0, 0)],
    "KvbatonInterTokenHigh": [between(99, 1), between(0, 9)],
    "KvbatonQueueLong": [queues(0), queues(0, 0, 0, 20), stands("vllm:num_requests_waiting", P0, 3)],
    "KvbatonCacheFull": [cache(100), cache(1000, "0 1 0 0x120"), stands("vllm:kv_cache_usage_perc", D0, 0.9)],
    "KvbatonErrorBurnFast": [responses(99, 1), OVER, responses(0, 0), QUIET_NIGHT],
    "KvbatonErrorBurnSlow": [responses(99.5, 0.5), responses(0, 0), QUIET_NIGHT],
    "KvbatonTtftBurnFast": [first_bytes(90, 10), LATE_OVER, first_bytes(0, 0.2)],
    "KvbatonTtftBurnSlow": [first_bytes(96, 4), first_bytes(0, 0.2)],
    "KvbatonNoPair": [pairs(0, 1), pairs(2, 2)],
    "KvbatonTargetDown": [stands("up", D0, 1), stands("up", 'instance="other",job="node"', 0)],
}


def case(alert: str, series: Series, fires: bool) -> dict[str, object]:
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else []
    question = {
        "expr": f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
        "eval_time": AT,
        "exp_samples": expected,
    }
    told = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "15s", "input_series": told, "promql_expr_test": [question]}


def check(tmp_path: Path, cases: list[dict[str, object]], rules: Path = RULES) -> None:
    page = tmp_path / "cases.yml"
    page.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": cases}))
    promtool("test", "rules", str(page))


def without_others(alert: str, tmp_path: Path) -> Path:
    """The rules as they are shipped, less the other alerts: each evaluation of them all takes a while."""
    parts = re.split(r"^(?= +- (?:alert|record|name): )", RULES.read_text(), flags=re.MULTILINE)
    kept = [part for part in parts if "- alert: " not in part or re.match(rf" +- alert: {alert}\n", part)]
    assert len(parts) - len(kept) == len(alerts()) - 1
    page = tmp_path / "rules.yml"
    page.write_text("".join(kept))
    return page


def test_promtool_accepts_what_is_shipped() -> None:
    assert f"{len(alerts())} rules" not in promtool("check", "rules", str(RULES)), "there are recording rules too"
    promtool("check", "config", str(CONFIG))


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert set(FIRES) == set(IS_SILENT) == set(alerts()) and len(alerts()) == len(set(alerts()))


@pytest.mark.parametrize("alert", alerts())
def test_an_alert_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    firing = [case(alert, series, True) for series in FIRES[alert]]
    silent = [case(alert, series, False) for series in IS_SILENT[alert]]
    check(tmp_path, [*firing, *silent], without_others(alert, tmp_path))


def test_a_case_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="FAILED"):
        check(tmp_path, [case("KvbatonNoPair", pairs(2, 2), True)])


def test_the_share_of_ttft_is_what_handing_over_takes_of_it(tmp_path: Path) -> None:
    question = {
        "expr": "mode:kvbaton_transfer_share:ratio5m", "eval_time": AT,
        "exp_samples": [{"labels": f'mode:kvbaton_transfer_share:ratio5m{{{R0},mode="pull"}}', "value": 0.25}],
    }  # fmt: skip
    told = [{"series": name, "values": values} for name, values in waits(8, 2).items()]
    check(tmp_path, [{"interval": "15s", "input_series": told, "promql_expr_test": [question]}])


def test_rules_ask_only_for_metrics_that_exist_and_failures_are_as_the_recorder_says() -> None:
    text = RULES.read_text()
    series = {name for metric in METRICS for name in metric.series} | set(BY_NAME)
    asked = set(re.findall(r"(?<![:\w])kvbaton_\w+", text))
    assert asked and asked <= series, asked - series
    (quiet,) = set(re.findall(r'end!~"([^"]+)"', text))
    assert set(quiet.split("|")) == {DELIVERED, *(str(end) for end in QUIET if end in set(Reason))}


def test_every_reason_at_a_data_port_is_one_that_alerts_know_and_the_page_explains() -> None:
    asked = [reasons.split("|") for reasons in re.findall(r'data_refused_total\{reason=~"([^"]+)"', RULES.read_text())]
    named = [reason for reasons in asked for reason in reasons]
    assert len(set(named)) == len(named)
    quiet = {Cause.LEFT, Cause.FULL, Cause.NOT_LENT, Cause.OTHER}  # a reader whose lease has just ended is not lent to
    assert {*named, *quiet} == set(Cause), "what is new is put somewhere on purpose"
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"\n| `{cause}` |" in page for cause in Cause if cause is not Cause.OTHER)


def test_every_alert_says_what_to_do() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    blocks = re.split(r"^ +- alert: ", RULES.read_text(), flags=re.MULTILINE)[1:]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    pages = urls["Documentation"].rpartition("/")[0]
    assert (ROOT / pages.partition("/blob/main/")[2] / "alerts.md").exists()
    for block in blocks:
        name = block.split("\n", 1)[0]
        for field in ("severity", "summary", "description", "runbook"):
            assert f"{field}: " in block, (name, field)
        assert f'runbook_url: "{pages}/alerts.md#{name.lower()}"\n' in block, name
        assert f"docs/alerts.md#{name.lower()}" in block and f"\n## {name}\n" in page
        assert f"[{name}](#{name.lower()})" in page
