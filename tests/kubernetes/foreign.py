"""Definitions of other people's kinds that the chart makes objects of, pinned by their module's checksum.

Lives here: which, from where. Never here: what is done with them.
Invariant: what is returned was read from the module with the pinned sum.
"""

import json
import pathlib
import subprocess

PROMETHEUS = ("github.com/prometheus-operator/prometheus-operator@v0.85.0",
              "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
              ["example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
               "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
               "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml"])
CERT_MANAGER = ("github.com/cert-manager/cert-manager@v1.21.2", "h1:UWgoYM+KLNtRlqmoWOKjKBOBUPVHeepQ6/ac3ERJW68=",
                ["deploy/crds/cert-manager.io_certificates.yaml"])


def definitions():
    """Paths of the definitions; downloads what is not in Go's module cache."""
    found = []
    for module, expected, files in (PROMETHEUS, CERT_MANAGER):
        done = subprocess.run(["go", "mod", "download", "-json", module], cwd="/", check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"go mod download {module}: exit status {done.returncode}\n{done.stdout}")
        told = json.loads(done.stdout)
        if told["Sum"] != expected:
            raise RuntimeError(f"{module}: expected sum {expected}, found {told['Sum']}")
        found += [pathlib.Path(told["Dir"]) / name for name in files]
    return found
