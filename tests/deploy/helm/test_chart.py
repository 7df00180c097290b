"""The chart, rendered by Helm's own library and checked against Kubernetes' JSON schemas: no cluster is needed.

ServiceMonitor and InferencePool are custom resources, whose schemas are in no package: their fields are compared with
what this file expects. Whether a kubelet runs the pod as told is not shown here (see tests/compose/test_pod.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.sidecar.supervisor import SPIN_ALWAYS_US
from grammar_service.config import ENVIRONMENT_PREFIX, GrammarConfig
from service_runtime.settings import ENV_PREFIX, settings_of
from tests.deploy.helm.conftest import CASES, REFUSED, TOKEN, Manifest, Rendered
from tools.images import IMAGES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None or importlib.util.find_spec("kubernetes_validate") is None,
    reason="needs helm-python-sdk and kubernetes-validate, which exist for Linux on x86-64",
)

OLDEST, NEWEST = "1.29", "1.37"
"""The oldest version that the chart installs on, and one of the newest that there are schemas of."""
CUSTOM = {"ServiceMonitor", "InferencePool"}
IN_NEWEST_ALONE = {"model image"}
"""Volumes of images are newer than the oldest version."""


@cache
def definitions(version: str) -> tuple[Path, Registry[Any]]:
    """Return the folder with the strict schemas of a version, and a registry of what they refer to."""
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    shared = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    return folder, shared @ Registry()


@cache
def validator(version: str, kind: str, api: str) -> jsonschema.Draft202012Validator:
    folder, registry = definitions(version)
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    schema = json.loads((folder / f"{kind.lower()}-{group}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def problems(manifest: Manifest, version: str) -> Iterator[str]:
    check = validator(version, manifest["kind"], manifest["apiVersion"])
    for error in check.iter_errors(manifest):
        yield f"{manifest['kind']} {manifest['metadata']['name']}: {error.json_path}: {error.message}"


def test_lint_finds_nothing_but_the_missing_icon(charts: Rendered) -> None:
    assert [message["error"] for message in charts.lint] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_fits_the_schemas_of_kubernetes(charts: Rendered, version: str) -> None:
    assert set(charts.manifests) == set(CASES), charts.errors
    skipped = IN_NEWEST_ALONE if version == OLDEST else set()
    checked = [m for case in sorted(set(CASES) - skipped) for m in charts.manifests[case] if m["kind"] not in CUSTOM]
    assert len(checked) > 30
    assert [problem for manifest in checked for problem in problems(manifest, version)] == []


def test_the_schemas_notice_a_wrong_field(charts: Rendered) -> None:
    manifest = json.loads(json.dumps(charts.one("default", "Deployment")))
    manifest["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    assert any("readinessProb" in problem for problem in problems(manifest, OLDEST))


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_work_are_refused_by_name(charts: Rendered, case: str) -> None:
    assert case in charts.errors, "it was rendered"
    assert REFUSED[case][1].strip("/").replace("/", ".") in charts.errors[case].replace("/", ".")


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("case", CASES)
def test_containers_hold_nothing_they_could_lose(charts: Rendered, case: str) -> None:
    for deployment in (m for m in charts.manifests[case] if m["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # Kubernetes would add LOCKSTEP_PORT and others for a Service of that name, and the processes read such names.
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod)
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]["cpu"]
            assert container["resources"]["limits"]["memory"]


def test_the_grammar_process_is_a_native_sidecar_that_shares_two_sockets_in_memory(charts: Rendered) -> None:
    pod = charts.pod("default")
    (grammar,), (engine,) = pod["initContainers"], pod["containers"]
    # Without this the kubelet ends both at once, and guided requests could not end in the drain.
    assert grammar["restartPolicy"] == "Always"
    shared = {m["name"] for m in grammar["volumeMounts"]} & {m["name"] for m in engine["volumeMounts"]}
    assert shared == {"sockets"}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "sockets"]
    assert volume["emptyDir"]["medium"] == "Memory"
    (place,) = [m["mountPath"] for m in grammar["volumeMounts"] if m["name"] == "sockets"]
    for name in ("engine", "grammar"):
        directory = charts.one("default", "ConfigMap", f"demo-lockstep-{name}")["data"]["LOCKSTEP_GRAMMAR_DIR"]
        assert Path(directory).parent == Path(place)
    assert "initContainers" not in charts.pod("no grammar")
    assert charts.one("no grammar", "ConfigMap", "demo-lockstep-engine")["data"]["LOCKSTEP_GRAMMAR"] == "none"


@pytest.mark.parametrize("case", CASES)
def test_each_process_has_three_grpc_probes_at_the_address_that_it_serves(charts: Rendered, case: str) -> None:
    for container in containers(charts.pod(case)):
        config = charts.one(case, "ConfigMap", f"demo-lockstep-{container['name']}")["data"]
        prefix = ENVIRONMENT_PREFIX if container["name"] == "grammar" else ENV_PREFIX
        port = int(config[f"{prefix}HEALTH_LISTEN"].removeprefix("0.0.0.0:"))
        assert port in [entry["containerPort"] for entry in container["ports"]]
        probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
        assert [probe["grpc"]["port"] for probe in probes] == [port] * 3
        assert probes[2]["failureThreshold"] * probes[2]["periodSeconds"] >= 60, "a slow answer is no death"


def test_readiness_asks_for_the_service_and_on_request_for_guided_requests(charts: Rendered) -> None:
    for case, service in (("default", "Engine"), ("everything", "Engine/guided")):
        probe = charts.pod(case)["containers"][0]["readinessProbe"]
        assert probe["grpc"]["service"] == f"lockstep.engine.v1.{service}"


@pytest.mark.parametrize("case", CASES)
def test_the_drain_fits_into_the_grace_period(charts: Rendered, case: str) -> None:
    pod = charts.pod(case)
    config = charts.one(case, "ConfigMap", "demo-lockstep-engine")["data"]
    (*_, script) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    pause = re.search(r"sleep\((\d+)\)", script)
    assert pause is not None
    # What remains is for closing the engine (at most 12 s) and then the grammar process.
    assert pod["terminationGracePeriodSeconds"] == int(pause[1]) + int(config["LOCKSTEP_DRAIN_TIMEOUT_S"]) + 30


def config_of(data: dict[str, str], prefix: str, *classes: type[Any]) -> list[Any]:
    """Return the settings that the process makes of its environment; every variable must belong to a setting."""
    settings = {f"{prefix}{s.name.upper()}": s for cls in classes for s in settings_of(cls)}
    mine = {name: text for name, text in data.items() if name.startswith(prefix)}
    assert set(mine) <= set(settings), "no such setting"
    values = {settings[name].name: settings[name].parse(text, name) for name, text in mine.items()}
    return [cls(**{s.name: values[s.name] for s in settings_of(cls) if s.name in values}) for cls in classes]


@pytest.mark.parametrize("case", CASES)
def test_the_processes_accept_their_environment(charts: Rendered, case: str) -> None:
    data = charts.one(case, "ConfigMap", "demo-lockstep-engine")["data"]
    engine, server = config_of(data, ENV_PREFIX, EngineConfig, ServerConfig)
    assert server.listen == "0.0.0.0:50051"
    if CASES[case].get("grammar", {}).get("enabled", True):
        data = charts.one(case, "ConfigMap", "demo-lockstep-grammar")["data"]
        (grammar,) = config_of(data, ENVIRONMENT_PREFIX, GrammarConfig)
        assert grammar.dir == server.grammar_dir
    if case == "everything":
        # A number of six digits and more is a float with an exponent to Helm.
        assert (server.grammar_handles_bytes, grammar.cache_bytes) == (268435456, 536870912)
        assert (server.services, server.stream_pace_ms, engine.max_batch_size) == ("kserve", 2.5, 8)
        assert (server.tls_client_ca, server.drain_timeout_s) == ("/run/secrets/tls/ca.crt", 100.0)
        assert (grammar.backend, grammar.compile_timeout_s) == ("xgrammar", 10.0)


def test_a_gpu_brings_its_resource_its_image_and_a_grammar_process_that_polls(charts: Rendered) -> None:
    (engine,) = charts.pod("everything")["containers"]
    assert engine["image"] == "registry.example.com/ml/lockstep-engine:gpu"
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 1, "memory": "8Gi"}
    data = charts.one("everything", "ConfigMap", "demo-lockstep-grammar")["data"]
    # A device cannot wake a sleeping process.
    assert float(data["LOCKSTEP_GRAMMAR_SPIN_US"]) == SPIN_ALWAYS_US
    assert charts.one("everything", "ConfigMap", "demo-lockstep-engine")["data"]["LOCKSTEP_SYNC"] == "device_flag"
    assert "nvidia" not in str(charts.manifests["default"])


def test_secrets_are_mounted_and_in_no_config_map(charts: Rendered) -> None:
    assert charts.one("everything", "Secret", "demo-lockstep-tokens")["stringData"]["tokens"].split() == [TOKEN]
    for manifest in charts.manifests["everything"]:
        assert manifest["kind"] == "Secret" or TOKEN not in str(manifest)
    for case, secret in (("everything", "demo-lockstep-tokens"), ("existing token secret", "mine")):
        (volume,) = [volume for volume in charts.pod(case)["volumes"] if volume["name"] == "tokens"]
        assert volume["secret"]["secretName"] == secret
    assert "Secret" not in charts.kinds("existing token secret")


def test_every_selector_means_the_engines_pods_and_never_smg(charts: Rendered) -> None:
    for case in ("everything", "smg"):
        labels = {
            m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"]
            for m in charts.manifests[case]
            if m["kind"] == "Deployment"
        }
        for manifest in charts.manifests[case]:
            kind, spec = manifest["kind"], manifest.get("spec", {})
            selector = spec.get("podSelector" if kind == "NetworkPolicy" else "selector", {})
            selector = selector.get("matchLabels", selector)
            if kind not in ("Service", "NetworkPolicy", "PodDisruptionBudget", "InferencePool", "Deployment"):
                continue
            chosen = {name for name, has in labels.items() if selector.items() <= has.items()}
            mine = "demo-lockstep-smg" if manifest["metadata"]["name"].endswith("-smg") else "demo-lockstep"
            assert chosen == {mine}, (kind, manifest["metadata"]["name"])


def test_changed_settings_make_new_pods(charts: Rendered) -> None:
    def checksum(case: str) -> str:
        template = charts.one(case, "Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/settings"])

    assert len(checksum("default")) == hashlib.sha256().digest_size * 2
    assert checksum("default") != checksum("no grammar")


def test_autoscaling_follows_waiting_requests(charts: Rendered) -> None:
    spec = charts.one("everything", "HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"]["name"] == "demo-lockstep"
    assert spec["metrics"][0]["pods"]["metric"] == {"name": "lockstep_sequences_waiting"}
    assert "replicas" not in charts.one("everything", "Deployment")["spec"], "both would set it"
    assert "HorizontalPodAutoscaler" not in charts.kinds("default")


def test_the_monitor_scrapes_each_pod_once(charts: Rendered) -> None:
    monitor = charts.one("everything", "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    chosen = []
    for service in (m for m in charts.manifests["everything"] if m["kind"] == "Service"):
        if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items():
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
            chosen.append(service["metadata"]["name"])
    assert chosen == ["demo-lockstep-pods"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_the_pool_sends_http_to_the_pods_and_names_its_picker(charts: Rendered) -> None:
    pool = charts.one("everything", "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    (engine,) = charts.pod("everything")["containers"]
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailClose"}


def test_the_policy_lets_clients_and_scrapers_in_and_little_out(charts: Rendered) -> None:
    policy = charts.one("everything", "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]]
    assert ports == [["grpc", "http"], ["metrics"]]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["egress"]] == [[53, 53], [443]]
    from_smg = charts.one("smg", "NetworkPolicy")["spec"]["ingress"][-1]
    assert from_smg["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "smg"


def test_smg_takes_its_arguments_and_the_engines_serve_what_it_speaks(charts: Rendered) -> None:
    if importlib.util.find_spec("smg") is None:
        pytest.skip("needs smg")
    from smg.launch_router import parse_router_args

    (smg,) = charts.pod("smg", "demo-lockstep-smg")["containers"]
    args = parse_router_args(smg["args"])
    assert args.service_discovery
    assert args.service_discovery_port == 50051
    labels = charts.one("smg", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert args.selector
    assert args.selector.items() <= labels.items()
    assert "app.kubernetes.io/component" in args.selector
    data = charts.one("smg", "ConfigMap", "demo-lockstep-engine")["data"]
    assert data["LOCKSTEP_SERVICES"] == "vllm,kv_events"
    assert charts.one("smg", "Role", "demo-lockstep-smg")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


def test_images_are_those_of_compose(charts: Rendered, root: Path) -> None:
    """tests/compose compares compose's names with the same table."""
    grammar, engine = containers(charts.pod("default"))
    assert engine["image"] == IMAGES["engine-cpu"].names("", "any")[0]
    assert grammar["image"] == IMAGES["grammar"].names("", "any")[0]
    smg = yaml.safe_load((root / "compose.smg.yaml").read_text())["services"]["smg"]
    assert charts.pod("smg", "demo-lockstep-smg")["containers"][0]["image"] == smg["image"]


def test_the_chart_has_the_version_of_the_distribution(root: Path) -> None:
    chart = yaml.safe_load((root / "deploy/helm/lockstep/Chart.yaml").read_text())
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
