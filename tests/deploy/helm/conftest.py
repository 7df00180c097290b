"""The chart's manifests for a set of values, made once by Helm itself.

Not responsible for: what must hold for them (see test_chart.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

TOKEN = "0123456789abcdef"
CASES: dict[str, dict[str, Any]] = yaml.safe_load("""
default: {}
everything:
  images: {prefix: registry.example.com/ml/, pullSecrets: [{name: pull}]}
  model:
    name: /models/Qwen3-0.6B
    volume: {persistentVolumeClaim: {claimName: models}}
    hubTokenSecret: hub
    offline: false
  cache: {volume: {persistentVolumeClaim: {claimName: cache}}}
  engine:
    settings: {max_batch_size: 8, grammar_handles_bytes: 268435456, services: kserve, stream_pace_ms: 2.5}
    env: [{name: OMP_NUM_THREADS, value: "4"}]
  grammar: {backend: xgrammar, settings: {compile_timeout_s: 10, cache_bytes: 536870912}}
  gpu: {count: 1}
  tls: {secretName: tls, clientCAKey: ca.crt}
  auth: {tokens: ["0123456789abcdef"]}
  http: {enabled: true}
  drain: {preStopSeconds: 7, timeoutSeconds: 100}
  probes: {readyMeansGuided: true}
  metrics: {serviceMonitor: {enabled: true, labels: {release: prometheus}}}
  autoscaling: {enabled: true, maxReplicas: 9}
  networkPolicy:
    enabled: true
    clients: [{namespaceSelector: {matchLabels: {team: search}}}]
    egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}], ports: [{port: 443}]}]
  inferencePool: {enabled: true, endpointPicker: {name: picker}}
  pod:
    annotations: {team: search}
    labels: {tier: a}
    nodeSelector: {gpu: "yes"}
    tolerations: [{key: nvidia.com/gpu, operator: Exists}]
    priorityClassName: high
    runtimeClassName: nvidia
    topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway}
  serviceAccount: {name: mine}
smg: {smg: {enabled: true}, networkPolicy: {enabled: true}}
no grammar: {grammar: {enabled: false}, podDisruptionBudget: {enabled: false}}
model image: {model: {volume: {image: {reference: "registry.example.com/qwen3:1"}}}}
existing token secret: {auth: {secretName: mine}}
""")
"""Name of a case -> values."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = yaml.safe_load("""
an unknown value: [{replica: 2}, replica]
a wrong type: [{replicas: two}, /replicas]
a misspelt setting: [{engine: {settings: {max_batchsize: 3}}}, max_batchsize]
a misspelt setting of the grammar process: [{grammar: {settings: {compile_timeout: 3}}}, compile_timeout]
an unknown library: [{grammar: {backend: outlines}}, /grammar/backend]
two sources of tokens: [{auth: {secretName: a, tokens: ["0123456789abcdef"]}}, "auth: secretName and tokens"]
a token that can be guessed: [{auth: {tokens: [secret]}}, /auth/tokens]
certificates without TLS: [{tls: {clientCAKey: ca.crt}}, "tls.clientCAKey: needs tls.secretName"]
smg with tokens: [{smg: {enabled: true}, auth: {tokens: ["0123456789abcdef"]}}, "smg: it reaches engines without TLS"]
a pool without HTTP: [{inferencePool: {enabled: true}}, "inferencePool: needs http.enabled"]
a pool without a picker:
  - {inferencePool: {enabled: true}, http: {enabled: true}}
  - "inferencePool.endpointPicker.name: is required"
readiness by a grammar process that is off:
  - {grammar: {enabled: false}, probes: {readyMeansGuided: true}}
  - "probes.readyMeansGuided: needs grammar.enabled"
a setting of the chart: [{engine: {settings: {listen: "0.0.0.0:1"}}}, "engine.settings.listen: the chart sets it"]
a setting of the chart for grammars: [{grammar: {settings: {dir: /x}}}, "grammar.settings.dir: the chart sets it"]
""")
"""Name of a case -> (values, a part of the refusal)."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """What Helm made of every case."""

    lint: list[dict[str, Any]]
    manifests: dict[str, list[Manifest]]
    errors: dict[str, str]

    def one(self, case: str, kind: str, name: str = "demo-lockstep") -> Manifest:
        """Return the manifest of a kind and a name."""
        (found,) = [m for m in self.manifests[case] if (m["kind"], m["metadata"]["name"]) == (kind, name)]
        return found

    def kinds(self, case: str) -> set[str]:
        """Return the kinds of a case."""
        return {manifest["kind"] for manifest in self.manifests[case]}

    def pod(self, case: str, name: str = "demo-lockstep") -> dict[str, Any]:
        """Return the pod template's spec of a Deployment."""
        spec: dict[str, Any] = self.one(case, "Deployment", name)["spec"]["template"]["spec"]
        return spec


@pytest.fixture(scope="session")
def charts(root: Path) -> Rendered:
    """Render every case in one process."""
    cases = CASES | {name: values for name, (values, _) in REFUSED.items()}
    command = [sys.executable, "-m", "tests.deploy.helm.render"]
    done = subprocess.run(
        command, cwd=root, input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    manifests, errors = dict[str, list[Manifest]](), dict[str, str]()
    for name, texts in answer["rendered"].items():
        if isinstance(texts, str):
            errors[name] = texts
            continue
        documents = (yaml.safe_load_all(text) for file, text in texts.items() if not file.endswith("NOTES.txt"))
        manifests[name] = [document for group in documents for document in group if document]
    return Rendered(answer["lint"], manifests, errors)
