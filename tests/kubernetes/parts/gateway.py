"""Envoy Gateway on the test cluster: its own chart, its real controller, the real Envoy that it deploys.

Lives here: the chart's values for a cluster without a registry, and which programs stand for its images.
Never here: Gateways and routes; those are the tests' own.
Invariant: nothing of Envoy Gateway is changed; only its chart's public values are set.
"""

import json
import subprocess

NAMESPACE = "envoy-gateway-system"
RELEASE = "eg"

VALUES = {
    # The injector needs a scheduler's node labels, which mean nothing on one node.
    "topologyInjector": {"enabled": False},
    "config": {"envoyGateway": {
        "gateway": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"},
        "provider": {"type": "Kubernetes", "kubernetes": {"leaderElection": {"disable": True}}},
        "extensionApis": {"enableBackend": True},
        "logging": {"level": {"default": "info"}}}},
}


def images(programs):
    """Image name parts of Envoy Gateway's chart and what stands for them."""
    return {
        "envoyproxy/gateway": {"entrypoint": ["envoy-gateway"],
                               "files": {"/app/bin/envoy-gateway": str(programs["envoy-gateway"])}},
        "envoyproxy/envoy": {"entrypoint": ["envoy"], "files": {"/app/bin/envoy": str(programs["envoy"])}},
    }


def install(programs, kubeconfig, folder, overrides=None):
    """`helm install --wait` of the chart: CRDs, certificates by its own job, the controller ready."""
    values = folder / "gateway-values.json"
    values.write_text(json.dumps(_merged(VALUES, overrides or {})))
    command = [str(programs["helm"]), "upgrade", "--install", RELEASE, str(programs["gateway-chart"]),
               "--namespace", NAMESPACE, "--create-namespace", "--values", str(values), "--wait", "--timeout", "3m",
               "--kubeconfig", str(kubeconfig)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"helm upgrade --install {RELEASE}: exit status {done.returncode}\n{done.stdout}")


def _merged(base, extra):
    if not (isinstance(base, dict) and isinstance(extra, dict)):
        return extra
    return {key: _merged(base[key], extra[key]) if key in base and key in extra else extra.get(key, base.get(key))
            for key in {**base, **extra}}
