"""The Kubernetes manifests: valid by schema, consistent, and made of commands that the product takes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from docs_commands import ROOT
from docs_rules import check_transfer_config, parsed
from docs_running import answered, until
from kubernetes_pods import Object, Pod, container, containers, has_keys, main_container, pod_spec
from tests.observe.prometheus.server import promtool

from kvbaton.control import key_room
from kvbaton.control import keyring as key_files
from kvbaton.control.joining.admission_files import new_token
from kvbaton.engines.embedded.http_worker import worker_app
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.observe.metrics.metric_names import METRICS
from kvbaton.protocol.legality import Role

FOLDER = ROOT / "deploy" / "kubernetes"
PYTHON = ROOT / ".venv-docs" / "bin" / "python"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
SECRETS = ("tickets", "router", "store", "prefill", "decode", "drain", "routers", "admission", "join")
GIVEN_SECRETS = {f"kvbaton-{name}" for name in SECRETS}
GIVEN_CONFIG_MAPS = {"kvbaton-public"}
VLLM_PATHS = {"/health", "/metrics"}
SLACK_S = 10


def rendered(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PYTHON.exists(), "the checker is not here: make docs-env"
    command = [PYTHON, ROOT / "tools" / "docs" / "docs_kubernetes.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[Object]]:
    ended = rendered("--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[Object]] = json.loads(ended.stdout)
    return found


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest, overlays: dict[str, list[Object]]) -> list[Object]:
    return overlays[request.param]


def of(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def workloads(objects: list[Object]) -> list[Object]:
    return of(objects, "Deployment", "StatefulSet")


def labels(one: Object) -> dict[str, str]:
    found: dict[str, str] = one["spec"]["template"]["metadata"]["labels"]
    return found


def selects(selector: Object, given: dict[str, str]) -> bool:
    same = all(given.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return same and all(given.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ()))


def ports(one: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in main_container(one)["ports"]}


# --- schemas


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("serviceName: store", "serviceNome: store"),
        ("containerPort: 7710", 'containerPort: "7710"'),
        ("resources:\n            requests", "resources:\n            request"),
    ],
)
def test_a_wrong_field_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    copy = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copy)
    text = (copy / "base" / "store.yaml").read_text()
    assert old in text
    (copy / "base" / "store.yaml").write_text(text.replace(old, new))
    ended = rendered(str(copy / "overlays" / "embedded"))
    assert ended.returncode == 1 and "StatefulSet/store" in ended.stderr


def test_what_the_renderer_does_not_know_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\nresources: []\n")
    ended = rendered(str(tmp_path))
    assert ended.returncode == 1 and "namePrefix" in ended.stderr


def test_a_patch_changes_what_it_names_and_nothing_else(overlays: dict[str, list[Object]]) -> None:
    for plain, with_gpu in zip(overlays["vllm"], overlays["vllm-gpu"], strict=True):
        if plain["kind"] != "StatefulSet" or plain["metadata"]["name"] == "store":
            assert plain == with_gpu
            continue
        before, after = main_container(plain), main_container(with_gpu)
        assert after["resources"]["limits"]["nvidia.com/gpu"] == "1" and before["args"] == after["args"]
        assert [each["name"] for each in before["env"]] == [each["name"] for each in after["env"]]


# --- what refers to what


def test_every_selector_finds_pods_and_every_port_is_named_by_them(objects: list[Object]) -> None:
    pods = workloads(objects)
    for one in pods:
        assert selects(one["spec"]["selector"], labels(one))
    for service in of(objects, "Service"):
        found = [one for one in pods if selects({"matchLabels": service["spec"]["selector"]}, labels(one))]
        assert len(found) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(found[0])
    for budget in of(objects, "PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"], labels(one)) for one in pods)
    for one in of(objects, "StatefulSet"):
        assert one["spec"]["serviceName"] in {service["metadata"]["name"] for service in of(objects, "Service")}


def test_network_policies_speak_of_pods_and_ports_that_exist_and_leave_none_open(objects: list[Object]) -> None:
    pods, closed = workloads(objects), set()
    for policy in of(objects, "NetworkPolicy"):
        meant = [one for one in pods if selects(policy["spec"]["podSelector"], labels(one))]
        assert meant, policy["metadata"]["name"]
        closed |= {one["metadata"]["name"] for one in meant}
        for rule in policy["spec"].get("ingress", ()):
            assert all(port["port"] in ports(one) for port in rule.get("ports", ()) for one in meant)
            for source in rule.get("from", ()):
                if "podSelector" in source:
                    assert any(selects(source["podSelector"], labels(one)) for one in pods)
    assert closed == {one["metadata"]["name"] for one in pods}


def test_every_volume_is_mounted_and_comes_from_something_that_is_there_or_documented(objects: list[Object]) -> None:
    maps = {one["metadata"]["name"] for one in of(objects, "ConfigMap")} | GIVEN_CONFIG_MAPS
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for one in workloads(objects):
        pod = pod_spec(one)
        mounts = [mount for each in containers(pod) for mount in each["volumeMounts"]]
        mounted = {mount["name"] for mount in mounts}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in GIVEN_SECRETS
                assert f"secret generic {volume['secret']['secretName']}" in page, "the page says how to make it"
            elif "persistentVolumeClaim" in volume:
                assert f"`{volume['persistentVolumeClaim']['claimName']}`" in page
            else:
                assert "sizeLimit" in volume["emptyDir"]


def test_a_pod_gets_no_identity_but_its_own(objects: list[Object]) -> None:
    for one in workloads(objects):
        if not has_keys(one):
            secrets = {volume["secret"]["secretName"] for volume in pod_spec(one)["volumes"] if "secret" in volume}
            assert secrets == {"kvbaton-join"}, "one token for all of them, and nothing else"
            continue
        (mount,) = [each for each in container(one, "keys")["volumeMounts"] if each["name"] == "identity"]
        assert (mount.get("subPath") or mount.get("subPathExpr")).endswith(".json"), "one file, not the whole Secret"
        assert not any(each["name"] in ("identity", "operator") for each in main_container(one)["volumeMounts"])


# --- what they run


def words_of(one: Object) -> list[str]:
    main = main_container(one)
    made_up = {"POD_IP": "10.0.0.9", "POD_NAME": "prefill-0", "MODEL": "/models/model"}
    return [re.sub(r"\$\((\w+)\)", lambda found: made_up[found[1]], word) for word in [*main["command"], *main["args"]]]


def test_every_command_line_is_one_that_the_product_takes(objects: list[Object]) -> None:
    for one in workloads(objects):
        words = words_of(one)
        if words[0] == "kvbaton":
            parsed(words)
        else:
            assert words[:2] == ["vllm", "serve"]
            check_transfer_config(words[words.index("--kv-transfer-config") + 1])
        for name in re.findall(r"tcp://(?:[a-z]+-[0-9]\.)?([a-z-]+):(\d+)", " ".join(words)):
            service = next(each for each in of(objects, "Service") if each["metadata"]["name"] == name[0])
            assert int(name[1]) in {port["port"] for port in service["spec"]["ports"]}


def test_ports_that_are_named_are_those_that_are_opened(objects: list[Object]) -> None:
    for one in workloads(objects):
        named, words = ports(one), " ".join(words_of(one))
        opened = {int(found) for found in re.findall(r"(?:port=|_port\": )(\d+)", words)}
        assert set(named.values()) == opened, one["metadata"]["name"]
        scraped = one["spec"]["template"]["metadata"].get("annotations", {})
        assert scraped.get("prometheus.io/port", str(named.get("http"))) == str(named.get("http"))


def test_probes_ask_for_paths_that_are_served(objects: list[Object]) -> None:
    worker_paths = set(worker_app(_Nobody()).routes)  # type: ignore[arg-type]
    security = (ROOT / "docs" / "security.md").read_text()  # a test holds its table of the router's paths to the router
    router_paths = set(re.findall(r"\| `(/[\w/]+)` \|", security.split("<!-- http router -->")[1].split("<!--")[0]))
    served = {"router": router_paths, "worker": worker_paths, "engine": VLLM_PATHS}
    for one in workloads(objects):
        main = main_container(one)
        probes = [main[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in main]
        assert "readinessProbe" in main and "livenessProbe" in main
        for probe in probes:
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in served[main["name"]]
            assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports(one)


class _Nobody:
    """A backend that is never asked."""


def test_whoever_is_told_to_stop_has_the_time_that_its_drain_may_take(objects: list[Object]) -> None:
    for one in workloads(objects):
        main, grace_s = main_container(one), pod_spec(one)["terminationGracePeriodSeconds"]
        before_s = 0.0
        if "lifecycle" in main:
            before = main["lifecycle"]["preStop"]["exec"]["command"]
            if before[-1].split()[-2:-1] == ["sleep"] or before[0] == "sleep":
                before_s = float(before[-1].split()[-1])
            else:
                order = before[2].removeprefix("exec ").replace('"$POD_NAME"', "prefill-0").split()
                before_s = parsed(order).timeout_s
                assert parsed(order).name == "operator-drain"
        drain_s = float(getattr(parsed(words_of(one)), "drain_s", 0)) if main["command"] == ["kvbaton"] else 0.0
        assert grace_s >= before_s + drain_s + SLACK_S, one["metadata"]["name"]
        if main["command"][0] == "vllm":
            text = words_of(one)[words_of(one).index("--kv-transfer-config") + 1]
            settings = ConnectorSettings.parse(json.loads(text)["kv_connector_extra_config"])
            waits = [float(word.partition("=")[2]) for word in words_of(one) if word.startswith("--shutdown-timeout=")]
            drain_s = before_s + sum(waits)
            assert drain_s > settings.max_hold_s, "no lease outlives the drain"
            assert grace_s >= drain_s + SLACK_S
            assert bool(waits) == bool(settings.drain_file), "a file orders the drain, SIGTERM waits for its end"
            assert settings.drain_file in " ".join(before)


def test_every_container_is_locked_down_and_asks_for_what_it_needs(objects: list[Object]) -> None:
    for one in workloads(objects):
        pod = pod_spec(one)
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        for each in containers(pod):
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(each["resources"]["requests"]) and "memory" in each["resources"]["limits"]
            assert ":" in each["image"], "a tag"


def test_pods_that_move_kv_have_shared_memory_of_their_own(objects: list[Object]) -> None:
    for one in workloads(objects):
        if one["metadata"]["name"] in ("prefill", "decode"):
            mounts = {mount["mountPath"]: mount["name"] for mount in main_container(one)["volumeMounts"]}
            (volume,) = [each for each in pod_spec(one)["volumes"] if each["name"] == mounts["/dev/shm"]]
            assert volume["emptyDir"]["medium"] == "Memory"


# --- keys


def test_keys_reach_a_pod_in_the_form_that_kvbaton_asks_for(tmp_path: Path, overlays: dict[str, list[Object]]) -> None:
    minted, script = tmp_path / "minted", FOLDER / "common" / "sync-keys.sh"
    key_files.mint(minted, ["router", "operator", "operator-drain", "prefill-0", "decode-0"])
    one = next(each for each in workloads(overlays["vllm"]) if each["metadata"]["name"] == "prefill")
    pod = Pod(one, "prefill-0", tmp_path)
    pod.mount(minted, script)
    assert key_files.load(pod.keys, "prefill-0").name == "prefill-0"
    assert key_files.load(pod.keys, "operator-drain").name == "operator-drain"
    assert not (pod.keys / "secret" / "decode-0.json").exists()
    for secret in [pod.keys / "tickets.json", *(pod.keys / "secret").iterdir()]:
        assert stat.S_IMODE(secret.stat().st_mode) == 0o400
    key_room.remove(minted, "decode-0")
    shutil.copy(minted / "removed.json", minted / "public" / ".removed.json")  # as docs/kubernetes.md has it
    shutil.rmtree(pod.folder / "in")
    pod.mount(minted, script)
    left = ["operator", "operator-drain", "prefill-0", "router"]
    assert sorted(path.name for path in (pod.keys / "public").iterdir()) == sorted(
        f"{name}.{kind}" for name in left for kind in ("json", "signing")
    )
    assert key_files.load(pod.keys, "prefill-0").removed_names == {"decode-0"}, "also for a pod that starts later"


def test_tokens_reach_a_router_and_uses_that_it_counts_are_kept(
    tmp_path: Path, overlays: dict[str, list[Object]]
) -> None:
    minted, script = tmp_path / "minted", FOLDER / "common" / "sync-keys.sh"
    key_files.mint(minted, ["router-0", "router-1"])
    token = new_token(minted, Role.BOTH, 3600.0, 5)
    pod = Pod(named(overlays["scaled"])["router"], "router-0", tmp_path)
    pod.mount(minted, script)
    copied, mounted = pod.keys / "tokens" / f"{token.id}.json", minted / "tokens" / f"{token.id}.json"
    assert copied.read_bytes() == mounted.read_bytes() and stat.S_IMODE(copied.stat().st_mode) == 0o600
    used = copied.read_bytes().replace(b'"uses":0', b'"uses":2')
    copied.write_bytes(used)
    for text, expected in ((mounted.read_bytes(), used), (b'{"revoked": true}', b'{"revoked": true}')):
        shutil.rmtree(pod.folder / "in")
        mounted.write_bytes(text)
        pod.mount(minted, script)
        assert copied.read_bytes() == expected, "what is mounted counts when it changes"


# --- autoscaling


def test_autoscalers_have_their_deployments_and_these_no_number_of_their_own(objects: list[Object]) -> None:
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in of(objects, "HorizontalPodAutoscaler")}
    deployments = {one["metadata"]["name"]: one for one in of(objects, "Deployment")}
    assert scaled <= set(deployments)
    assert all("replicas" not in deployments[name]["spec"] for name in scaled), "an apply would undo the autoscaler"
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for one in of(objects, "HorizontalPodAutoscaler"):
        for metric in one["spec"]["metrics"]:
            assert f"as: {metric['pods']['metric']['name']}" in page, "the adapter's rule is there"


def keda() -> dict[str, Object]:
    page = json.loads(rendered("--plain", str(FOLDER / "keda.yaml")).stdout)
    assert {(one["apiVersion"], one["kind"]) for one in page} == {("keda.sh/v1alpha1", "ScaledObject")}
    return {one["metadata"]["name"]: one for one in page}


@pytest.mark.parametrize("overlay", ["scaled", "scaled-vllm"])
def test_keda_scales_what_the_autoscalers_do_within_the_same_bounds(
    overlay: str, overlays: dict[str, list[Object]]
) -> None:
    autoscalers = {one["metadata"]["name"]: one["spec"] for one in of(overlays[overlay], "HorizontalPodAutoscaler")}
    found = keda()
    assert set(found) == set(autoscalers) == {"prefill", "decode"}
    for name, one in found.items():
        spec, theirs = one["spec"], autoscalers[name]
        fields = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"}
        assert set(spec) == fields, "no field that KEDA does not have"
        assert one["metadata"]["namespace"] == "kvbaton" and spec["scaleTargetRef"]["name"] == name
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (theirs["minReplicas"], theirs["maxReplicas"])
        taken = spec["advanced"]["horizontalPodAutoscalerConfig"]
        assert taken == {"name": name, "behavior": theirs["behavior"]}, "two autoscalers of one Deployment would fight"
        assert one["metadata"]["annotations"] == {"scaledobject.keda.sh/transfer-hpa-ownership": "true"}
        for trigger in spec["triggers"]:
            assert trigger["type"] == "prometheus" and set(trigger) == {"type", "metadata"}
            assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
            assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes texts only"


@pytest.mark.parametrize(
    ("cache", "used"),
    [
        ({"kvbaton_engine_blocks": (100, 100), "kvbaton_engine_free_blocks": (40, 80)}, 0.8),
        ({"vllm:kv_cache_usage_perc": (0.5, 0.75)}, 1.25),
    ],
)
def test_kedas_queries_are_the_sum_over_workers_whatever_engine_and_however_many_routers(
    cache: dict[str, tuple[float, float]], used: float, tmp_path: Path
) -> None:
    given = 'namespace="kvbaton",pod="{}"'
    labels = given + ',role="{}",worker="{}",state="{}"'
    series = {
        f"kvbaton_router_worker_requests{{{labels.format(router, role, f'{role}-{number}', state)}}}": count
        for router in ("router-0", "router-1")
        for role, counts in (("prefill", (3, 4)), ("decode", (1, 0)))
        for number, waiting in enumerate(counts)
        for state, count in (("waiting", waiting), ("running", 50))
    }
    for name, values in cache.items():
        role = "" if name.startswith("vllm:") else ',role="decode"'
        for number, value in enumerate(values):
            series[f"{name}{{{given.format(f'decode-{number}')}{role}}}"] = value
            series[f"{name}{{{given.format(f'prefill-{number}')}{role.replace('decode', 'prefill')}}}"] = value / 2
    found = keda()
    queries = [
        trigger["metadata"]["query"] for name in ("prefill", "decode") for trigger in found[name]["spec"]["triggers"]
    ]
    expected = (7, 1, used)
    tests = [
        {
            "expr": f"round(1000 * ({query}))",
            "eval_time": "1m",
            "exp_samples": [{"labels": "{}", "value": round(value * 1000)}],
        }
        for query, value in zip(queries, expected, strict=True)
    ]
    told = [{"series": name, "values": f"{value}+0x8"} for name, value in series.items()]
    page = tmp_path / "keda.yml"
    page.write_text(json.dumps({"tests": [{"interval": "15s", "input_series": told, "promql_expr_test": tests}]}))
    promtool("test", "rules", str(page))
    known = {name for metric in METRICS for name in metric.series}
    assert set(re.findall(r"kvbaton_\w+", " ".join(queries))) <= known


def test_a_router_behind_a_service_listens_where_port_forward_connects(objects: list[Object]) -> None:
    hosts = {one["metadata"]["name"]: parsed(words_of(one)).host for one in workloads(objects) if is_router(one)}
    assert hosts == {"router": "0.0.0.0"}


def test_the_pod_monitor_finds_every_pod_that_has_metrics(objects: list[Object]) -> None:
    (monitor,) = json.loads(rendered("--plain", str(ROOT / "deploy" / "prometheus" / "podmonitor.yaml")).stdout)
    spec = monitor["spec"]
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert set(spec) == {"namespaceSelector", "selector", "podMetricsEndpoints"}
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics" and spec["namespaceSelector"] == {"matchNames": ["kvbaton"]}
    for one in workloads(objects):
        found = selects(spec["selector"], labels(one))
        assert found == (endpoint["port"] in ports(one)), one["metadata"]["name"]


def is_router(one: Object) -> bool:
    return main_container(one)["name"] == "router"


def named(objects: list[Object]) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in workloads(objects)}


# --- the demos, as processes


@pytest.mark.timeout(300)
def test_the_demo_overlay_serves_with_the_very_command_lines_of_its_pods(
    tmp_path: Path, overlays: dict[str, list[Object]]
) -> None:
    named = {one["metadata"]["name"]: one for one in workloads(overlays["embedded"])}
    minted = tmp_path / "minted"
    key_files.mint(minted, ["router", "operator", "store", "prefill-0", "decode-0"])
    pods = {
        name: Pod(named[one], name, tmp_path)
        for name, one in (("router", "router"), ("store", "store"), ("prefill-0", "prefill"), ("decode-0", "decode"))
    }
    names = {"registry": pods["router"].ip, "store": pods["store"].ip}
    for pod in pods.values():
        pod.mount(minted, FOLDER / "common" / "sync-keys.sh")
    with contextlib.ExitStack() as stack:
        processes: dict[str, Any] = {}
        try:
            for name, pod in pods.items():
                processes[name] = stack.enter_context(pod.running(names))
            until("readiness of the router", lambda: '"ok"' in (answered(pods["router"].url("/health")) or ""))
            for name in ("prefill-0", "decode-0"):
                until(f"readiness of {name}", lambda name=name: '"ok"' in (answered(pods[name].url("/health")) or ""))
            body = {"prompt": "Once upon a time " * 8, "max_tokens": 8, "temperature": 0}
            request = urllib.request.Request(
                pods["router"].url("/v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
            until("the put", lambda: _figure(pods["prefill-0"], "store_puts_total") == 1)
            until("the handoff", lambda: _figure(pods["decode-0"], "delivered_total") == 1)
            processes["decode-0"].send_signal(signal.SIGTERM)  # as kubelet does
            until("the drain", lambda: '"ok"' not in (answered(pods["decode-0"].url("/health")) or ""))
            processes["decode-0"].wait(pod_spec(named["decode"])["terminationGracePeriodSeconds"])
            assert processes["decode-0"].returncode == 0
        except AssertionError as error:
            logs = {path.parent.name: path.read_text()[-1500:] for path in tmp_path.glob("*/log")}
            raise AssertionError(f"{error}\n{json.dumps(logs, indent=1)}") from error


def _figure(pod: Pod, name: str) -> int:
    found: int = json.loads(answered(pod.url("/stats")) or "{}").get(name, 0)
    return found


@pytest.mark.timeout(300)
def test_the_scaled_overlay_serves_scales_and_loses_a_router(tmp_path: Path, overlays: dict[str, list[Object]]) -> None:
    """Workers of one configuration and one token, behind two routers, of which one goes."""
    found, minted = named(overlays["scaled"]), tmp_path / "minted"
    key_files.mint(minted, ["router-0", "router-1"])
    token = new_token(minted, Role.BOTH, 3600.0, 0).text
    routers = [Pod(found["router"], f"router-{number}", tmp_path) for number in range(2)]
    workers = [
        Pod(found[name.partition("-")[0]], name, tmp_path) for name in ("prefill-a1-x", "decode-b2-y", "decode-b2-z")
    ]
    names = {f"{pod.name}.registry": pod.ip for pod in routers}
    for pod in routers:
        pod.mount(minted, FOLDER / "common" / "sync-keys.sh")
    for pod in workers:
        pod.give_token(token)

    def listed(pod: Pod) -> set[str]:
        told = json.loads(answered(pod.url("/workers")) or '{"workers": []}')["workers"]
        return {each["name"].rpartition("-")[0] for each in told if each["state"] == "serving"}

    def ask(pod: Pod) -> None:
        body = {"prompt": "Once upon a time " * 8, "max_tokens": 8, "temperature": 0}
        asked = urllib.request.Request(
            pod.url("/v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status == 200

    with contextlib.ExitStack() as stack:
        try:
            running = [stack.enter_context(pod.running(names)) for pod in [*routers, *workers[:2]]]
            for pod in routers:
                until("two workers", lambda pod=pod: listed(pod) == {"prefill-a1-x", "decode-b2-y"})
            stack.enter_context(workers[2].running(names))  # the autoscaler wants one more
            for pod in routers:
                until("the third", lambda pod=pod: "decode-b2-z" in listed(pod))
                ask(pod)
            running[0].kill()
            running[3].send_signal(signal.SIGTERM)  # and one less
            until("one less", lambda: listed(routers[1]) == {"prefill-a1-x", "decode-b2-z"})
            assert running[3].wait(pod_spec(found["decode"])["terminationGracePeriodSeconds"]) == 0
            ask(routers[1])
            assert sum(_figure(pod, "delivered_total") for pod in workers[2:]) >= 1
        except AssertionError as error:
            logs = {path.parent.name: path.read_text()[-1500:] for path in tmp_path.glob("*/log")}
            raise AssertionError(f"{error}\n{json.dumps(logs, indent=1)}") from error
