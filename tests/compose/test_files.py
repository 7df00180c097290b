"""What compose.yaml and the Dockerfiles promise about containers, read from the files: no Docker is needed.

Not responsible for: the containers themselves (see test_containers.py).
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_engine.api.capabilities import OF_START, Start, refuse
from gpu_engine.api.config import EngineConfig, ServerConfig
from gpu_engine.api.transfer_config import TransferConfig
from gpu_engine.front.port.listening import ServerError
from gpu_engine.sidecar.supervisor import SPIN_ALWAYS_US
from http_gateway.config import ENVIRONMENT_PREFIX, GatewayConfig
from tools.images import IMAGES

SERVICES = ("engine", "grammar")
TARGETS = {"engine-cpu": "build-engine", "grammar": "build-grammar", "gateway": "build-gateway"}
"""The final stages of `Dockerfile`, each with the stage that it copies from."""


@pytest.fixture
def compose(root: Path) -> dict[str, Any]:
    return load(root, "compose.yaml")


def load(root: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((root / name).read_text())
    return document


def stages(root: Path) -> dict[str, str]:
    """Return the instructions of each stage of `Dockerfile` by its name, comments and line ends left out."""
    lines = [line for line in (root / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    found = re.split(r"^FROM ", "\n".join(lines).replace("\\\n", " "), flags=re.MULTILINE)[1:]
    return {stage.split(maxsplit=3)[2]: stage for stage in found}


@pytest.mark.parametrize("service", SERVICES)
def test_containers_hold_nothing_they_could_lose(compose: dict[str, Any], service: str) -> None:
    settings = compose["services"][service]
    assert settings["user"].split(":")[0] not in ("", "0", "root")
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["restart"] == "unless-stopped"
    assert settings["init"] is True
    assert settings["pids_limit"] > 0
    for granted in ("cap_add", "privileged", "devices", "ipc", "pid"):
        assert granted not in settings


def test_the_two_share_the_sockets_and_nothing_else(compose: dict[str, Any]) -> None:
    volumes = {name: compose["services"][name]["volumes"] for name in SERVICES}
    assert volumes["grammar"] == ["sockets:/run/lockstep"]
    assert set(volumes["engine"]) & set(volumes["grammar"]) == {"sockets:/run/lockstep"}
    options = compose["volumes"]["sockets"]["driver_opts"]
    assert options["type"] == "tmpfs"
    user = compose["services"]["engine"]["user"].split(":")[0]
    assert {"mode=0700", f"uid={user}", "nosuid", "nodev", "noexec"} <= set(options["o"].split(","))


def test_the_grammar_process_has_no_network(compose: dict[str, Any]) -> None:
    grammar = compose["services"]["grammar"]
    assert grammar["network_mode"] == "none"
    assert "ports" not in grammar


def test_ports_are_published_to_this_machine_alone(compose: dict[str, Any]) -> None:
    ports = compose["services"]["engine"]["ports"]
    assert "${LOCKSTEP_PUBLISH:-127.0.0.1:50051}:50051" in ports
    assert [port for port in ports if not re.fullmatch(r"\$\{\w+:-127\.0\.0\.1:(\d+)\}:\1", port)] == []


def test_one_variable_swaps_the_backend_and_the_engine_does_not_see_it(compose: dict[str, Any], root: Path) -> None:
    grammar = compose["services"]["grammar"]
    assert grammar["image"].endswith(
        "lockstep-grammar:${LOCKSTEP_VERSION:+${LOCKSTEP_VERSION}-}${GRAMMAR_BACKEND:-llguidance}"
    )
    assert grammar["build"]["args"]["GRAMMAR_BACKEND"] == "${GRAMMAR_BACKEND:-llguidance}"
    assert grammar["environment"]["LOCKSTEP_GRAMMAR_BACKEND"] == "${GRAMMAR_BACKEND:-llguidance}"
    assert "GRAMMAR_BACKEND" not in str(compose["services"]["engine"])
    # Compose makes a container again when one that it depends on is.
    assert "depends_on" not in compose["services"]["engine"]


@pytest.mark.parametrize("service", SERVICES)
def test_health_is_asked_of_the_process_itself(compose: dict[str, Any], service: str) -> None:
    settings = compose["services"][service]
    module = {"engine": "gpu_engine", "grammar": "grammar_service"}[service]
    assert settings["healthcheck"]["test"][:5] == ["CMD", "python", "-m", module, "health"]


def test_a_gpu_is_an_override(root: Path, compose: dict[str, Any]) -> None:
    services = load(root, "compose.gpu.yaml")["services"]
    (device,) = services["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    # A device cannot wake a sleeping process, so the grammar process must poll for its posts.
    assert services["engine"]["environment"]["LOCKSTEP_SYNC"] == "${LOCKSTEP_SYNC:-device_flag}"
    assert services["grammar"]["environment"]["LOCKSTEP_GRAMMAR_SPIN_US"].endswith(f":-{SPIN_ALWAYS_US:.0f}}}")
    assert "nvidia" not in str(compose)


def test_every_overlay_is_brought_up_where_there_is_docker(root: Path) -> None:
    tests = (root / "tests/compose/test_containers.py").read_text()
    overlays = {path.name for path in root.glob("compose.*.yaml")}
    assert {name for name in overlays if f'"{name}"' not in tests} == {"compose.gpu.yaml"}


HARDENING = ("user", "read_only", "cap_drop", "security_opt", "init", "restart")


@pytest.mark.parametrize(
    ("overlay", "service", "more"),
    [
        ("compose.http.yaml", "gateway", ("tmpfs", "logging")),
        ("compose.disaggregated.yaml", "prefill", ("image", "tmpfs", "logging")),
        ("compose.smg.yaml", "smg", ()),
    ],
)
def test_a_service_of_an_overlay_is_as_hardened_as_the_engine(
    root: Path, compose: dict[str, Any], overlay: str, service: str, more: tuple[str, ...]
) -> None:
    added, engine = load(root, overlay)["services"][service], compose["services"]["engine"]
    for name in (*HARDENING, *more):
        assert added[name] == engine[name], name
    assert all("127.0.0.1:" in port for port in added.get("ports", ()))
    assert not any("/run/lockstep" in volume for volume in added.get("volumes", ())), "it has no grammar process"


def test_the_overlays_settings_are_accepted(root: Path) -> None:
    gateway = load(root, "compose.http.yaml")["services"]["gateway"]["environment"]
    given = {name.removeprefix(ENVIRONMENT_PREFIX).lower(): value for name, value in gateway.items()}
    assert "ENV LOCKSTEP_GATEWAY_LISTEN=0.0.0.0:8000" in stages(root)["gateway"]
    assert GatewayConfig(**given).engines == ("engine:50051",)
    services = load(root, "compose.disaggregated.yaml")["services"]
    assert "ports" not in services["prefill"], "clients ask the engine that decodes"
    prefill, engine = services["prefill"]["environment"], services["engine"]["environment"]
    assert (engine["LOCKSTEP_ROLE"], engine["LOCKSTEP_PREFILL_FROM"]) == ("decode", "prefill:50051")
    prefills = EngineConfig(transfer=TransferConfig(role=prefill["LOCKSTEP_ROLE"]))
    decodes = EngineConfig(transfer=TransferConfig(role="decode", prefill_from=(engine["LOCKSTEP_PREFILL_FROM"],)))
    of_prefill = ServerConfig(grammar=prefill["LOCKSTEP_GRAMMAR"], grammar_dir=prefill["LOCKSTEP_GRAMMAR_DIR"])
    for config, server in ((prefills, of_prefill), (decodes, ServerConfig())):
        refuse(OF_START, Start(config, server), ServerError)
    assert load(root, "compose.smg.yaml")["services"]["engine"]["environment"] == {
        "LOCKSTEP_SERVICES": "vllm,kv_events"
    }


def test_secrets_are_mounted_and_not_built_in(root: Path) -> None:
    engine = load(root, "compose.tls.yaml")["services"]["engine"]
    (mount,) = engine["volumes"]
    assert mount.endswith(":/run/secrets:ro")
    for name in ("TLS_CERT", "TLS_KEY", "AUTH_TOKEN_FILE"):
        assert engine["environment"][f"LOCKSTEP_{name}"].startswith("/run/secrets/")


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_the_composed_user_without_sources_or_compiler(
    root: Path, compose: dict[str, Any], target: str
) -> None:
    every = stages(root)
    image = every["final"] + every[target]
    assert every[target].startswith("final AS ")
    assert "gcc" in every["tools"]
    assert "gcc" not in image
    assert "pip" not in image
    copies = re.findall(r"^COPY (.*)", image, re.MULTILINE)
    assert copies == [f"--from={TARGETS[target]} /opt/lockstep /opt/lockstep"]
    assert "USER ${UID}:${UID}" in every[target]
    (uid,) = set(re.findall(r"^ARG UID=(\d+)", image, re.MULTILINE))
    assert [uid, uid] == compose["services"]["engine"]["user"].split(":")


def test_an_image_has_a_title_a_description_and_a_licence(root: Path) -> None:
    every = stages(root)
    assert 'image.licenses="Apache-2.0"' in every["final"]
    for target in TARGETS:
        assert re.search(r'image\.title="[^"]+"\s+org\.opencontainers\.image\.description="[^"]+"', every[target])


def test_compose_names_the_images_that_are_built_and_pushed(root: Path) -> None:
    """Each with and without a version, and with a build of the same target where no registry has it."""
    built = {name: image for image in IMAGES.values() for name in image.names("ml/", "1.2.3")}
    for variables in ({}, {"LOCKSTEP_VERSION": "1.2.3"}, {"GRAMMAR_BACKEND": "xgrammar"}):
        for name in ("compose.yaml", "compose.gpu.yaml", "compose.http.yaml"):
            for service in load(root, name)["services"].values():
                if "image" in service:
                    image = built[interpolated(service["image"], {"LOCKSTEP_IMAGES": "ml/"} | variables)]
                    assert image.target == service["build"]["target"]


def interpolated(text: str, variables: dict[str, str]) -> str:
    """Return what compose makes of `${NAME:-default}` and `${NAME:+text}`."""
    pattern = re.compile(r"\$\{(\w+)(?::([-+])((?:[^{}]|\$\{\w+\})*))?\}")

    def value(match: re.Match[str]) -> str:
        name, sign, other = match.groups()
        there = variables.get(name, "")
        return (other if there else "") if sign == "+" else there or other or ""

    while pattern.search(text):
        text = pattern.sub(value, text)
    return text


def test_the_small_sidecar_refuses_torch_when_it_is_built(root: Path) -> None:
    assert "find_spec('torch')" in stages(root)["build-grammar"]


def test_only_sources_get_into_a_build(root: Path) -> None:
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert taken == {
        *("LICENSE", "README.md", "pyproject.toml", "setup.py", "client", "locks"),
        *("gpu_engine", "grammar_service", "http_gateway", "kernels", "protos", "service_runtime", "shared_mem"),
        "tools/torch_index.py",
    }


def test_smg_is_the_one_of_the_tests_and_keeps_its_metrics_to_itself(root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [requirement.partition(";")[0] for requirement in extras["dev"] if requirement.startswith("smg==")]
    smg = load(root, "compose.smg.yaml")["services"]["smg"]
    assert f"pip install --no-cache-dir {pin}\n" in smg["build"]["dockerfile_inline"]
    assert smg["image"] == f"lockstep-smg:{pin.removeprefix('smg==')}"
    # Its metrics have no password, and listen on every address by default.
    assert {"--worker-urls=grpc://engine:50051", "--prometheus-host=127.0.0.1"} <= set(smg["command"])


def test_the_image_of_the_engine_has_the_wire_of_the_gateway(root: Path) -> None:
    assert "vllm-wire]" in stages(root)["build-engine"]


def imported(path: Path) -> set[str]:
    """Return the packages that a module imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_the_small_image_has_every_package_that_its_modules_import(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["llguidance"]]
    distributions = {re.split(r"[^A-Za-z0-9-]", requirement)[0].replace("-", "_") for requirement in required}
    installed = {
        module
        for module, owners in packages_distributions().items()
        if distributions & {owner.replace("-", "_") for owner in owners}
    }
    folders = ("grammar_service", "service_runtime", "shared_mem", "protos/grammar")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    other = root / "grammar_service/backends/xgrammar"
    wanted = {name for path in files if not path.is_relative_to(other) for name in imported(path)}
    assert "llguidance" in wanted
    # The last one is the type checker's.
    own = {"grammar_service", "protos", "service_runtime", "shared_mem", "_typeshed"}
    assert wanted - installed - own - set(sys.stdlib_module_names) == set()
