"""The one test cluster, and the commands that tests give it.

Lives here: starting the parts, kubectl and helm, simulated engine pods, requests. Never here: what is expected.
Invariant: a command that fails unexpectedly shows its whole output; a wait ends with what was last seen.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "parts"))

ROOT = HERE.parent.parent
CHART = ROOT / "charts" / "sidestep"
PATIENCE = 60.0

RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True,
              "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}
GATEWAY_CLASS = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "GatewayClass", "metadata": {"name": "eg"},
                 "spec": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"}}
MODEL = "sidestep-small"


def binary():
    """The program under test: `SIDESTEP_BINARY`, or the debug build."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    return pathlib.Path(os.environ.get("SIDESTEP_BINARY") or target / "debug" / "sidestep").resolve()


class Cluster:
    """Commands against a running `Parts`."""

    def __init__(self, parts):
        self.parts = parts
        self.environment = parts.environment()

    def run(self, command, given=None, fails=False, warnings=True):
        """What a command says: both its outputs, or, without `warnings`, its standard output only."""
        done = subprocess.run([str(word) for word in command], input=given, env=self.environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        if (done.returncode != 0) != fails:
            wanted = "to fail" if fails else "to succeed"
            raise AssertionError(f"{' '.join(map(str, command))}: expected it {wanted}\n{done.stdout}{done.stderr}"
                                 f"{self.trouble()}")
        return done.stdout + done.stderr if warnings else done.stdout

    def kubectl(self, *arguments, given=None, fails=False):
        return self.run(["kubectl", *arguments], given, fails)

    def helm(self, *arguments, given=None, fails=False):
        return self.run(["helm", *arguments], given, fails)

    def apply(self, *objects):
        self.kubectl("apply", "--server-side", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List",
                                                                            "items": list(objects)}))

    def get(self, *arguments):
        return json.loads(self.run(["kubectl", "get", *arguments, "-o", "json"], warnings=False))

    def namespace(self, name, level="restricted"):
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": name, "labels": {"pod-security.kubernetes.io/enforce": level}}})

    def install(self, release, namespace, values, *arguments):
        """`helm upgrade --install --wait` of the chart with these values."""
        return self.helm("upgrade", "--install", release, CHART, "--namespace", namespace, "--values", "-", "--wait",
                         "--timeout", "90s", *arguments, given=json.dumps(values))

    def trouble(self):
        """What the pods' logs end with, for a failure's message."""
        found = []
        for log in sorted((self.parts.folder / "pods").glob("*/*/log")):
            if "envoy-gateway" not in str(log):
                text = log.read_text(errors="replace").splitlines()[-4:]
                found.append("\n".join([f"-- {log.relative_to(self.parts.folder)}", *text]))
        return "\n".join(found)[-6000:]

    def engines(self, namespace, role, count, labels=None, arguments=()):
        """Simulated engine pods of one role as a Deployment; returns their addresses when they are ready."""
        labels = {"app": "engine", "llm-d.ai/role": role, **(labels or {})}
        name = f"engine-{role}"
        self.apply({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": count, "selector": {"matchLabels": labels}, "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{
                    "name": "engine", "image": "sidestep", "securityContext": RESTRICTED,
                    "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "args": ["engine", f"--role={role}", f"--model={MODEL}", "--listen=$(POD_IP):8000",
                             "--events=$(POD_IP):5557", "--replay=$(POD_IP):5558", "--record-requests=64", *arguments],
                    "ports": [{"name": "http", "containerPort": 8000}],
                    "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1}}]}}}})
        self.kubectl("-n", namespace, "rollout", "status", f"deployment/{name}", "--timeout=60s")
        pods = self.get("-n", namespace, "pods", "-l", f"llm-d.ai/role={role},app=engine")["items"]
        return [(pod["metadata"]["name"], pod["status"]["podIP"]) for pod in pods]

    def inside(self, address, url):
        """The body of a GET made from within the pod of this address: for what listens on its loopback only."""
        pids = [path.name for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
        for pid in pids:
            enter = ["nsenter", f"--net=/proc/{pid}/ns/net"]
            try:
                command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if not command.startswith(b"sleep\0infinity"):
                continue
            addresses = subprocess.run([*enter, "ip", "-o", "addr"], stdout=subprocess.PIPE, text=True, check=False)
            if f"inet {address}/" in addresses.stdout:
                script = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=5).read().decode())"
                return self.run([*enter, sys.executable, "-c", script])
        raise AssertionError(f"{address}: expected a pod with this address, found none")

    def gateway(self, namespace, name):
        """The gateway's address, once it is programmed."""
        self.kubectl("-n", namespace, "wait", f"gateway/{name}", "--for=condition=Programmed", "--timeout=60s")
        found = self.get("-n", namespace, "gateway", name)
        return found["status"]["addresses"][0]["value"]


def static_pods(decode, prefill):
    """The chart's list of pods for engines made by `Cluster.engines`."""
    return [{"name": name, "address": f"{ip}:8000", "role": role,
             "kvEvents": {"address": f"tcp://{ip}:5557", "replay": f"tcp://{ip}:5558"}}
            for role, pods in (("decode", decode), ("prefill", prefill)) for name, ip in pods]


def until(condition, what, seconds=PATIENCE):
    """Waits for the condition's first true value and returns it."""
    deadline = time.monotonic() + seconds
    last = None
    while time.monotonic() < deadline:
        try:
            last = condition()
            if last:
                return last
        except (OSError, AssertionError, ValueError, KeyError, IndexError) as error:
            last = error
        time.sleep(0.05)
    raise AssertionError(f"{what}: expected within {seconds:.0f} s, last seen: {last!r}")


def get(url, timeout=5):
    """Status, headers and body of a GET; statuses are no errors."""
    return _send(urllib.request.Request(url), timeout)


def chat(base, text, headers=None, model=MODEL, max_tokens=4, timeout=30):
    """Status, headers and body of a chat completion."""
    body = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(f"{base}/v1/chat/completions", data=json.dumps(body).encode(), method="POST",
                                     headers={"content-type": "application/json", **(headers or {})})
    return _send(request, timeout)


def _send(request, timeout):
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()
