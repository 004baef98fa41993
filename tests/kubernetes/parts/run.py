"""One container of a pod through all its restarts: probes, restart policy, hooks, environment and mounts.

Lives here: what a container's spec asks for over time. Never here: the pod's order of things (`pod.py`), confinement
(`container.py`).
Invariant: `ready` is true only after the process runs and its readiness probe passed.
"""

import base64
import pathlib
import subprocess
import time

import probes
from api import ApiError
from container import Container, expand
from volumes import field, timestamp

UNREADY_SECONDS = 0.2   # how often a container that is not ready yet is asked, whatever its period
RESTART_SECONDS = 0.5   # first delay before a restart; doubles up to ten times as much


class Run:
    """One container of a pod through all its restarts."""

    def __init__(self, pod, spec):
        self.pod, self.spec = pod, spec
        self.image = pod.node.image(spec["image"])
        self.pretended = self.image is None
        self.container, self.code = None, None
        self.restarts, self.delay, self.restart_at = 0, RESTART_SECONDS, 0.0
        self.started_at = self.ended_at = None
        self._fresh()

    def _fresh(self):
        self.ready = self.pretended
        self.startup_passed = self.pretended or "startupProbe" not in self.spec
        self.counts, self.due = {}, {}

    def start(self):
        self.started_at, self.code = timestamp(), None
        self._fresh()
        self.begun = time.monotonic()
        if self.pretended:
            return
        env = self._environment()
        security = {**self.pod.object["spec"].get("securityContext", {}), **self.spec.get("securityContext", {})}
        self.container = Container(self.spec, self.image, env, self._mounts(env), self.pod.sandbox.pid,
                                   self.pod.folder / self.spec["name"], security)

    def will_restart(self):
        policy = self.spec.get("restartPolicy") or self.pod.object["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and self.code != 0)

    def look(self):
        """Sees what became of the process, restarts it when due, and asks the probes that are due."""
        if self.pretended:
            return
        now = time.monotonic()
        if self.code is None:
            self.code = self.container.exit_code()
            if self.code is not None:
                self.ended_at, self.ready = timestamp(), False
                self.restart_at, self.delay = now + self.delay, min(self.delay * 2, RESTART_SECONDS * 10)
        if self.code is not None:
            if self.will_restart() and now >= self.restart_at:
                self.restarts += 1
                self.start()
            return
        if not self.startup_passed:
            outcome = self._ask("startupProbe", now, eager=True)
            self.startup_passed = outcome is True
            if outcome is False:
                self.container.kill()
            return
        if "readinessProbe" in self.spec:
            outcome = self._ask("readinessProbe", now, eager=not self.ready)
            self.ready = self.ready if outcome is None else outcome
        else:
            self.ready = True
        if "livenessProbe" in self.spec and self._ask("livenessProbe", now, eager=False) is False:
            self.container.kill()

    def _ask(self, kind, now, eager):
        """True or False once a threshold is reached, None otherwise. Failures count once per period."""
        probe = self.spec[kind]
        period = probe.get("periodSeconds", 10)
        first = self.begun + probe.get("initialDelaySeconds", 0)
        due, counted_due = self.due.get(kind, (first, first))
        if now < due:
            return None
        ports = {port["name"]: port["containerPort"] for port in self.spec.get("ports", []) if "name" in port}
        passed = probes.attempt(probe, ports, self.pod.address, self.container.run_inside)
        passes, failures = self.counts.get(kind, (0, 0))
        if passed:
            passes, failures = passes + 1, 0
        elif now >= counted_due:
            passes, failures = 0, failures + 1
        if now >= counted_due:
            counted_due = now + period
        self.due[kind] = (now + (min(period, UNREADY_SECONDS) if eager else period), counted_due)
        self.counts[kind] = (passes, failures)
        if passes >= probe.get("successThreshold", 1):
            return True
        return False if failures >= probe.get("failureThreshold", 3) else None

    def pre_stop(self, deadline):
        hook = self.spec.get("lifecycle", {}).get("preStop", {})
        left = max(0.0, deadline - time.monotonic())
        try:
            if "exec" in hook:
                self.container.run_inside(hook["exec"]["command"], left)
            elif "httpGet" in hook:
                probes.attempt({"httpGet": hook["httpGet"], "timeoutSeconds": left},
                               {port.get("name"): port["containerPort"] for port in self.spec.get("ports", [])},
                               self.pod.address, None)
            elif "sleep" in hook:
                end = time.monotonic() + min(left, hook["sleep"]["seconds"])
                while time.monotonic() < end and self.container.exit_code() is None:
                    time.sleep(0.05)
        except subprocess.TimeoutExpired:
            pass

    def _mounts(self, env):
        mounts = []
        for mount in self.spec.get("volumeMounts", []):
            source = self.pod.volumes.path(mount["name"])
            part = mount.get("subPath") or expand(mount.get("subPathExpr", ""), env)
            if part:
                source = source / part
                if not source.exists():
                    source.mkdir(parents=True)
                    source.chmod(0o777)
            declared = next(one for one in self.pod.object["spec"]["volumes"] if one["name"] == mount["name"])
            mounts.append((mount["mountPath"], source, bool(mount.get("readOnly")) or "emptyDir" not in declared))
        return sorted(mounts, key=lambda one: len(pathlib.PurePath(one[0]).parts))

    def _environment(self):
        pod = self.pod.object
        env = {"HOSTNAME": self.pod.meta["name"]}
        if pod["spec"].get("enableServiceLinks", True):
            env |= {"KUBERNETES_SERVICE_HOST": self.pod.node.service_host, "KUBERNETES_SERVICE_PORT": "443",
                    "KUBERNETES_SERVICE_PORT_HTTPS": "443"}
        else:
            env |= {"KUBERNETES_SERVICE_HOST": self.pod.node.service_host, "KUBERNETES_SERVICE_PORT": "443"}
        for source in self.spec.get("envFrom", []):
            kind = "configMapRef" if "configMapRef" in source else "secretRef"
            data = self._data(kind.removesuffix("Ref"), source[kind])
            env |= {source.get("prefix", "") + key: value for key, value in data.items()}
        for entry in self.spec.get("env", []):
            value = self._value(entry, env)
            if value is not None:
                env[entry["name"]] = value
        return env

    def _value(self, entry, env):
        source = entry.get("valueFrom")
        if source is None:
            return expand(entry.get("value", ""), env)
        if "fieldRef" in source:
            if source["fieldRef"]["fieldPath"] in ("status.podIP", "status.podIPs"):
                return self.pod.address  # known here before the API has it
            return field(self.pod.object, source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            return _resource(self.spec, source["resourceFieldRef"])
        for kind in ("configMap", "secret"):
            reference = source.get(f"{kind}KeyRef")
            if reference:
                return self._data(kind, reference).get(reference["key"])
        return None

    def _data(self, kind, reference):
        path = f"/api/v1/namespaces/{self.pod.meta['namespace']}/{kind}s".lower()
        try:
            data = self.pod.node.api.get(f"{path}/{reference['name']}").get("data", {})
        except ApiError as error:
            if error.status == 404 and reference.get("optional"):
                return {}
            raise
        return data if kind == "configMap" else {key: base64.b64decode(text).decode() for key, text in data.items()}


_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9, "m": 1e-3, "": 1}


def _resource(spec, reference):
    """`limits.cpu` and the like; rounded up to the divisor, as the kubelet does."""
    side, name = reference["resource"].split(".", 1)
    found = spec.get("resources", {}).get(side, {}).get(name) or ("1" if name == "cpu" else "1Gi")
    value, divisor = (_quantity(str(one)) for one in (found, reference.get("divisor") or "1"))
    divisor = divisor or 1
    return str(int(-(-value // divisor)))


def _quantity(text):
    number = text.rstrip("KMGikm")
    return float(number) * _UNITS[text[len(number):]]
