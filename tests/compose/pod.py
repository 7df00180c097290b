"""The chart's pod as containers under Docker: image, user, root, volumes, environment and probes as Helm rendered them.

The containers share a network and the volume `sockets`, none has an init, and each volume in memory is a tmpfs with
the mode that a kubelet gives it. Not shown here: the kubelet itself, which restarts, probes and ends containers; the
tests do that with Docker's commands, in the kubelet's order.

Not responsible for: what must hold (see test_pod.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

NAME = "lockstep-test-pod"
VALUES: dict[str, Any] = {
    "engine": {"settings": {"num_threads": 1, "max_batch_size": 4, "max_model_len": 2048}},
    "http": {"enabled": True},
    "drain": {"preStopSeconds": 1, "timeoutSeconds": 60},
}


def docker(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> str:
    """Return stdout."""
    command = ["docker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Pod:
    """The rendered pod; its containers are named after it."""

    spec: dict[str, Any]
    environment: dict[str, dict[str, str]]
    """By container."""

    @classmethod
    def render(cls, root: Path) -> Pod:
        """Return the chart's pod."""
        command = [sys.executable, "-m", "tests.deploy.helm.render"]
        given = json.dumps({"pod": VALUES})
        done = subprocess.run(command, cwd=root, input=given, capture_output=True, text=True, check=True)
        files = json.loads(done.stdout)["rendered"]["pod"]
        assert not isinstance(files, str), files
        spec = yaml.safe_load(files["lockstep/templates/deployment.yaml"])["spec"]["template"]["spec"]
        maps = yaml.safe_load_all(files["lockstep/templates/configmap.yaml"])
        return cls(spec, {item["metadata"]["name"].removeprefix("demo-lockstep-"): item["data"] for item in maps})

    def container(self, name: str) -> dict[str, Any]:
        """Return a container's part of the spec."""
        (found,) = [c for c in (*self.spec["initContainers"], *self.spec["containers"]) if c["name"] == name]
        return dict(found)

    def create(self, name: str) -> None:
        """Make a container as the spec says, and start it."""
        spec, pod = self.container(name), self.spec["securityContext"]
        security = spec["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        drops = [word for capability in security["capabilities"]["drop"] for word in ("--cap-drop", capability)]
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        docker(
            *("run", "--detach", "--name", f"{NAME}-{name}", "--network", f"container:{NAME}"),
            *("--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--group-add", str(pod["fsGroup"])),
            *("--read-only", *drops, "--security-opt", "no-new-privileges:true"),
            *(word for m in spec["volumeMounts"] for word in self._mount(volumes[m["name"]], m["mountPath"])),
            *(word for key, text in self.environment[name].items() for word in ("--env", f"{key}={text}")),
            spec["image"],
        )

    def _mount(self, volume: dict[str, Any], path: str) -> list[str]:
        source = volume["emptyDir"]
        if volume["name"] == "sockets":
            return ["--volume", f"{NAME}:{path}"]
        if source.get("medium") == "Memory":
            return ["--tmpfs", f"{path}:size={source['sizeLimit'].removesuffix('Mi')}m,mode=1777"]
        return ["--volume", path]  # on disk, as long as the container

    def start(self) -> None:
        """Start the network and the volume, the grammar process until its probe passes, then the engine."""
        fs_group = self.spec["securityContext"]["fsGroup"]
        # A kubelet gives an emptyDir to the pod's group, for everybody to write.
        options = ("type=tmpfs", "device=tmpfs", f"o=size=1m,mode=2777,gid={fs_group}")
        docker("volume", "create", *(word for option in options for word in ("--opt", option)), NAME)
        ports = [str(port["containerPort"]) for c in ("grammar", "engine") for port in self.container(c)["ports"]]
        publish = [word for port in ports for word in ("--publish", f"127.0.0.1::{port}")]
        image = self.container("grammar")["image"]
        docker("run", "--detach", "--name", NAME, *publish, "--entrypoint", "sleep", image, "infinity")
        self.create("grammar")
        self.probe("grammar", "startup", wait_s=60)
        self.create("engine")
        self.probe("engine", "startup", wait_s=300)

    def remove(self) -> None:
        """Leave nothing."""
        docker("rm", "--force", "--volumes", f"{NAME}-engine", f"{NAME}-grammar", NAME, check=False)
        docker("volume", "rm", "--force", NAME, check=False)

    def address(self, port: int) -> str:
        """Return where a port of the pod is published."""
        return docker("port", NAME, str(port)).splitlines()[0].replace("127.0.0.1", "localhost")

    def probe(self, name: str, which: str, wait_s: float = 0.0) -> int:
        """Ask as the kubelet's gRPC probe does; return the status. Waits up to `wait_s` for SERVING."""
        target = self.container(name)[f"{which}Probe"]["grpc"]
        request = health_pb2.HealthCheckRequest(service=target.get("service", ""))
        with grpc.insecure_channel(self.address(target["port"])) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            if not wait_s:
                return int(stub.Check(request, timeout=10).status)
            for answer in stub.Watch(request, timeout=wait_s, wait_for_ready=True):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return int(answer.status)
        raise AssertionError(f"{name}: the {which} probe did not pass")

    def end(self, name: str) -> int:
        """End a container as the kubelet does: preStop, SIGTERM, and SIGKILL after the grace; return its status."""
        hook = self.container(name).get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook:
            docker("exec", f"{NAME}-{name}", *hook["command"])
        grace = self.spec["terminationGracePeriodSeconds"]
        docker("stop", "--time", str(grace), f"{NAME}-{name}", timeout_s=grace + 30)
        return int(self.inspect(name, "{{.State.ExitCode}}"))

    def inspect(self, name: str, template: str) -> str:
        """Return what `docker inspect --format` says of a container."""
        return docker("inspect", "--format", template, f"{NAME}-{name}")

    def inside(self, name: str, script: str, check: bool = True) -> str:
        """Run a shell script in a container; return its stdout."""
        return docker("exec", f"{NAME}-{name}", "sh", "-c", script, check=check)
