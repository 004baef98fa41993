"""The picker as a process against a real API server, under a service account of its own.

Lives here: what the tests of discovery, policies and rights share. Never here: assertions about behaviour.
Invariant: whatever is started here ends with its context manager.
"""

import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "parts"))

from api import ApiError  # noqa: E402, F401

GROUP = "inference.networking.k8s.io"
ACCOUNT = "sidestep"
RESTRICTED = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
              "seccompProfile": {"type": "RuntimeDefault"}}


def binary():
    """The program under test: SIDESTEP, or the debug build, built when need be."""
    if os.environ.get("SIDESTEP"):
        return pathlib.Path(os.environ["SIDESTEP"])
    subprocess.run(["cargo", "build", "--quiet", "--locked", "--bin", "sidestep"], cwd=ROOT, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    return target / "debug" / "sidestep"


def eventually(what, condition, seconds=15.0):
    """Waits until `condition()` is true and returns its value; fails with `what` and the last value after that."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        last = condition()
        if last:
            return last
        time.sleep(0.05)
    raise AssertionError(f"never: {what}; last: {last!r}")


def kinds(parts, *paths):
    """Makes the cluster know InferencePools and DisaggregationPolicies, or the kinds in these files."""
    paths = paths or (ROOT / "tests/kubernetes/parts/inferencepool.crd.yaml", ROOT / "manifests/crds")
    for path in paths:
        kubectl(parts, "apply", "--server-side", "-f", path)
    kubectl(parts, "wait", "crd", "--all", "--for=condition=Established")


def kubectl(parts, *arguments, given=None):
    done = subprocess.run(["kubectl", *map(str, arguments)], env=parts.environment(), input=given, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise AssertionError(f"kubectl {' '.join(map(str, arguments))}: {done.returncode}\n{done.stdout}")
    return done.stdout


class Space:
    """A namespace with Pod Security `restricted`, a service account with exactly the rights the program names."""

    def __init__(self, cluster, program, name):
        self.cluster, self.program, self.name, self.api = cluster, program, name, cluster.api
        rights = subprocess.run([program, "rights"], check=True, capture_output=True, text=True).stdout
        self.role = json.loads(rights)

    def create(self):
        self.api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": self.name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
        self.api.create(self.path("serviceaccounts"), {"apiVersion": "v1", "kind": "ServiceAccount",
                                                       "metadata": {"name": ACCOUNT}})
        # Without it the server admits no pod.
        accounts = self.path("serviceaccounts")
        eventually("the default account is there", lambda: any(
            one["metadata"]["name"] == "default" for one in self.api.get(accounts)["items"]))
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.name}"
        self.grant(self.role["rules"])
        self.api.create(f"{rbac}/rolebindings", {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": ACCOUNT},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": self.name}]})
        eventually("the namespace has the account that pods get", self.has_default_account)
        return self

    def has_default_account(self):
        try:
            return self.api.get(self.path("serviceaccounts") + "/default")
        except ApiError:
            return None

    def grant(self, rules):
        """Gives the account these rules and no others, and waits until the API server has heard of it."""
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.name}/roles"
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": ACCOUNT},
                "rules": rules}
        if self.api.create(rbac, role) is None:
            self.api.put(f"{rbac}/{ACCOUNT}", role)

    def kubeconfig(self, folder):
        """A kubeconfig with a token of the account, as a pod would have it."""
        token = self.api.post(self.path(f"serviceaccounts/{ACCOUNT}/token"), {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}})
        path = pathlib.Path(folder) / f"{self.name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {
                "server": f"https://{self.cluster.address}:{self.cluster.port}",
                "certificate-authority": str(self.cluster.ca)}}],
            "users": [{"name": "u", "user": {"token": token["status"]["token"]}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": self.name}}]}))
        return path

    def path(self, resource):
        return f"/api/v1/namespaces/{self.name}/{resource}"

    def pools(self, name=""):
        return f"/apis/{GROUP}/v1/namespaces/{self.name}/inferencepools" + (f"/{name}" if name else "")

    def policies(self, name=""):
        kind = f"/apis/sidestep.dev/v1alpha1/namespaces/{self.name}/disaggregationpolicies"
        return kind + (f"/{name}" if name else "")

    def policy(self, name="policy", pool="pool", **bypass):
        """Creates a policy with one rule, or changes it to be so."""
        target = {"group": GROUP, "kind": "InferencePool", "name": pool}
        spec = {"rules": [{"bypass": bypass or {"type": "Always"}}], **({"targetRef": target} if pool else {})}
        body = {"apiVersion": "sidestep.dev/v1alpha1", "kind": "DisaggregationPolicy", "metadata": {"name": name},
                "spec": spec}
        if self.api.create(self.policies(), body) is None:
            held = self.api.get(self.policies(name))
            body["metadata"]["resourceVersion"] = held["metadata"]["resourceVersion"]
            self.api.put(self.policies(name), body)

    def conditions(self, name="policy"):
        """type -> (status, reason)"""
        status = self.api.get(self.policies(name)).get("status", {})
        return {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions", [])}

    def pool(self, name="pool", labels=None, ports=(8000,)):
        """Creates the pool, or changes it to be so."""
        spec = {"selector": {"matchLabels": labels or {"app": "engine"}},
                "targetPorts": [{"number": port} for port in ports],
                "endpointPickerRef": {"name": "sidestep", "port": {"number": 9002}}}
        body = {"apiVersion": f"{GROUP}/v1", "kind": "InferencePool", "metadata": {"name": name}, "spec": spec}
        try:
            held = self.api.get(self.pools(name))
        except ApiError as error:
            if error.status != 404:
                raise
            return self.api.post(self.pools(), body)
        body["metadata"]["resourceVersion"] = held["metadata"]["resourceVersion"]
        return self.api.put(self.pools(name), body)

    def pod(self, name, address, role=None, labels=None, annotations=None, ready=True):
        """Creates a pod as a kubelet that runs it would leave it."""
        labels = {"app": "engine"} if labels is None else labels
        if role is not None:
            labels = {**labels, "llm-d.ai/role": role}
        self.api.post(self.path("pods"), {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": labels, "annotations": annotations or {}},
            "spec": {"nodeName": "node", "terminationGracePeriodSeconds": 30,
                     "containers": [{"name": "engine", "image": "engine", "securityContext": RESTRICTED}]}})
        return self.status(name, address, ready)

    def status(self, name, address, ready=True, phase="Running"):
        addresses = [{"ip": address}] if address else []
        return self.api.patch(self.path(f"pods/{name}/status"), {"status": {
            "phase": phase, "podIP": address, "podIPs": addresses,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}})

    def relabel(self, name, labels):
        return self.api.patch(self.path(f"pods/{name}"), {"metadata": {"labels": labels}})

    def remove(self, name):
        """Removes a pod at once, as a kubelet does when its containers have ended."""
        self.api.delete(self.path(f"pods/{name}"), {"kind": "DeleteOptions", "apiVersion": "v1",
                                                    "gracePeriodSeconds": 0})


class Picker:
    """The picker as a process. A context manager."""

    def __init__(self, program, folder, config, kubeconfig, environment=None):
        self.program, self.folder = program, pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kubeconfig, self.environment = kubeconfig, environment or {}
        self.admin, self.ext_proc, health = _free_ports(3)
        self.health = health
        config = {"apiVersion": "sidestep.dev/v1alpha1", "kind": "SidestepConfig", "tls": {"mode": "Plaintext"},
                  "listen": {"extProc": f"127.0.0.1:{self.ext_proc}", "health": f"127.0.0.1:{health}",
                             "admin": f"127.0.0.1:{self.admin}"}, **config}
        self.config = self.folder / "config.json"
        self.config.write_text(json.dumps(config))
        self.log_path = self.folder / "picker.log"
        self.process = None

    def __enter__(self):
        log = self.log_path.open("ab")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
        self.process = subprocess.Popen(
            [self.program, "--log", "info,sidestep=debug", "serve", "--config", self.config],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**environment, "KUBECONFIG": str(self.kubeconfig), "NO_COLOR": "1", **self.environment})
        log.close()
        eventually("the picker serves its admin port", lambda: self.get("/healthz")[0] == 200 or self._alive())
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def _alive(self):
        if self.process.poll() is not None:
            raise AssertionError(f"the picker ended with {self.process.returncode}:\n{self.log()}")
        return False

    def log(self):
        return self.log_path.read_text(errors="replace")

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def ready(self):
        status, text = self.get("/readyz")
        return status == 200, text

    def pods(self):
        """name -> (endpoint, role, availability)"""
        status, text = self.get("/v1/pods")
        if status != 200:
            return None
        return {pod["name"]: (pod["endpoint"], pod["role"], pod["availability"]) for pod in json.loads(text)}

    def policy(self):
        """Name of the policy in force, and its rules."""
        status, text = self.get("/v1/policy")
        found = json.loads(text) if status == 200 else {}
        return found.get("name"), found.get("rules")

    def metric(self, name, **labels):
        """The value of one series, or None."""
        _, text = self.get("/metrics")
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == f"sidestep_{name}" and all(f'{key}="{one}"' in series
                                                                  for key, one in labels.items()):
                return float(value)
        return None

    def expect(self, pods, seconds=15.0):
        """Waits until the picker knows exactly these pods."""
        return eventually(f"the pods are {pods}, log:\n{self.log()[-4000:]}", lambda: self.pods() == pods, seconds)


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def kubernetes_pods(**more):
    return {"pods": {"kubernetes": {"pool": "pool", "probe": "off", **more}},
            "policy": {"inline": {"rules": [{"bypass": {"type": "Never"}}]}}}


def kubernetes_policy(**more):
    return {**kubernetes_pods(), "policy": {"kubernetes": more}}
