"""The life of one pod on the node: sandbox, init containers, containers, probes, status, end.

Lives here: the order of things and what a kubelet would report. Never here: how a process is confined (`container.py`).
Invariant: one thread owns a pod; the status it reports is what it saw of the processes, never a wish.

A container whose image stands for no program here is *pretended*: reported running and ready, nothing runs.
"""

import shutil
import signal
import subprocess
import threading
import time

import isolated
from api import ApiError
from processes import die_with_parent
from run import Run
from volumes import Volumes, timestamp

TICK = 0.1
VOLUME_SECONDS = 1.0


class Pod(threading.Thread):
    """One pod. `node` gives the API, images, addresses and folders; `update` and `vanish` bring news."""

    def __init__(self, node, found):
        super().__init__(daemon=True, name=found["metadata"]["name"])
        self.node, self.object = node, found
        self.meta = found["metadata"]
        self.path = f"/api/v1/namespaces/{self.meta['namespace']}/pods/{self.meta['name']}"
        self.folder = node.folder / "pods" / f"{self.meta['namespace']}_{self.meta['name']}_{self.meta['uid'][:8]}"
        self.news = threading.Condition()
        self.gone = self.stopping = self.finished = False
        self.address, self.sandbox, self.reported = None, None, None
        self.volumes = Volumes(node.api, found, self.folder / "volumes")
        self.volumes_due = 0.0
        self.runs = {}
        self.started_at = timestamp()

    # ---- news from the watch ---------------------------------------------------------------------------------------

    def update(self, found):
        """False when the thread has seen its last object."""
        with self.news:
            if self.finished:
                return False
            self.object = found
            self.news.notify()
            return True

    def vanish(self):
        with self.news:
            self.gone = True
            self.news.notify()

    def stop(self):
        with self.news:
            self.stopping = True
            self.news.notify()

    def ending(self):
        return self.gone or self.stopping or "deletionTimestamp" in self.object["metadata"]

    # ---- the thread ------------------------------------------------------------------------------------------------

    def run(self):
        try:
            if self._bind() and self._prepare():
                self._live()
        except ApiError as error:
            self.node.say(f"{self.name}: {error}")
        finally:
            self._end()

    def _bind(self):
        """Does the scheduler's work: every pod goes to the one node."""
        if self.object["spec"].get("nodeName"):
            return True
        try:
            self.node.api.post(f"{self.path}/binding", {
                "apiVersion": "v1", "kind": "Binding", "metadata": {"name": self.meta["name"]},
                "target": {"apiVersion": "v1", "kind": "Node", "name": self.node.name}})
        except ApiError as error:
            if error.status in (404, 409):
                return error.status == 409
            raise
        return True

    def _prepare(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "volumes").mkdir(exist_ok=True)
        self.address = self.node.take_address()
        self._sandbox()
        self._etc()
        self.object.setdefault("status", {}).update(podIP=self.address, hostIP=isolated.NODE_ADDRESS)
        while not self.ending():
            try:
                self.volumes.lay()
                break
            except ApiError as error:
                self.node.say(f"{self.name}: waits for {error}")
                self._report(waiting="ContainerCreating")
                self._wait(0.5)
        spec = self.object["spec"]
        for container in spec.get("initContainers", []):
            if not self._init(container):
                return False
        for container in spec["containers"]:
            self.runs[container["name"]] = Run(self, container)
            self.runs[container["name"]].start()
        return not self.ending()

    def _init(self, container):
        run = self.runs[container["name"]] = Run(self, container)
        run.start()
        while not self.ending():
            run.look()
            self._report(waiting="PodInitializing")
            if run.pretended or (container.get("restartPolicy") == "Always" and run.startup_passed):
                return True
            if run.code == 0 and container.get("restartPolicy") != "Always":
                return True
            if run.code is not None and self.object["spec"].get("restartPolicy") == "Never":
                self._report(phase="Failed")
                return False
            self._wait(TICK)
        return False

    def _live(self):
        while not self.ending():
            for run in self.runs.values():
                run.look()
            self._report()
            if time.monotonic() >= self.volumes_due:
                self.volumes_due = time.monotonic() + VOLUME_SECONDS
                try:
                    self.volumes.lay()
                except ApiError as error:
                    self.node.say(f"{self.name}: keeps its files: {error}")
            self._wait(TICK)

    def _wait(self, seconds):
        with self.news:
            if not self.ending():
                self.news.wait(seconds)

    def _end(self):
        grace = self.object["metadata"].get("deletionGracePeriodSeconds", 30)
        deadline = time.monotonic() + (0 if self.stopping or self.gone else grace)
        running = [run for run in self.runs.values() if run.code is None and not run.pretended]
        # Side by side: one container's hook may wait for another's.
        endings = [threading.Thread(target=self._terminate, args=(run, deadline), daemon=True) for run in running]
        for ending in endings:
            ending.start()
        for ending in endings:
            ending.join(max(0.1, deadline - time.monotonic()))
        while time.monotonic() < deadline and any(run.container.exit_code() is None for run in running):
            time.sleep(0.02)
        for run in running:
            if run.container.exit_code() is None:
                run.container.kill()
            run.code = run.container.exit_code()
        if self.sandbox:
            self.sandbox.kill()
            self.sandbox.wait()
        with self.news:
            self.finished = True
        if "deletionTimestamp" in self.object["metadata"] and not self.gone and not self.stopping:
            try:
                self._report()
                self.node.api.delete(self.path, {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
                                                 "preconditions": {"uid": self.meta["uid"]}})
            except ApiError as error:
                if error.status not in (404, 409):
                    self.node.say(f"{self.name}: {error}")
        for run in self.runs.values():
            shutil.rmtree(self.folder / run.spec["name"] / "root", ignore_errors=True)

    @staticmethod
    def _terminate(run, deadline):
        if time.monotonic() < deadline:
            run.pre_stop(deadline)
        run.container.signal(signal.SIGTERM)

    # ---- sandbox ---------------------------------------------------------------------------------------------------

    def _sandbox(self):
        """Network, IPC and host-name namespaces held open by a sleeping process, joined to the bridge by a veth pair."""
        ready = self.folder / "sandbox.ready"
        self.sandbox = subprocess.Popen(
            ["unshare", "--net", "--ipc", "--uts", "sh", "-c",
             f"hostname {self.meta['name'][:63]}; : > '{ready}'; exec sleep infinity"],
            stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        while not ready.exists() and self.sandbox.poll() is None:
            time.sleep(0.005)
        pid = self.sandbox.pid
        link = f"veth{int(self.address.split('.')[2]):02x}{int(self.address.split('.')[3]):02x}"
        _ip(f"link add {link} type veth peer name eth0 netns {pid}")
        _ip(f"link set {link} master {isolated.BRIDGE} up")
        inside = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
        for line in ("link set lo up", f"addr add {self.address}/{isolated.POD_PREFIX} dev eth0", "link set eth0 up",
                     f"route add default via {isolated.NODE_ADDRESS}"):
            subprocess.run([*inside, *line.split()], check=True)

    def _etc(self):
        etc = self.folder / "etc"
        etc.mkdir(exist_ok=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.meta['name']}\n")
        search = f"{self.meta['namespace']}.svc.cluster.local svc.cluster.local cluster.local"
        (etc / "resolv.conf").write_text(f"nameserver {isolated.NODE_ADDRESS}\nsearch {search}\noptions ndots:5\n")
        (etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nnonroot:x:65532:65532::/:/bin/sh\n")
        (etc / "group").write_text("root:x:0:\nnonroot:x:65532:\n")
        (etc / "nsswitch.conf").write_text("hosts: files dns\n")

    # ---- status ----------------------------------------------------------------------------------------------------

    def _report(self, phase=None, waiting=None):
        spec = self.object["spec"]
        statuses = [self._container_status(one, waiting) for one in spec["containers"]]
        init = [self._container_status(one, waiting) for one in spec.get("initContainers", [])]
        runs = [self.runs[one["name"]] for one in spec["containers"] if one["name"] in self.runs]
        complete = len(runs) == len(spec["containers"])
        ended = complete and all(run.code is not None and not run.will_restart() for run in runs)
        if phase is None:
            phase = "Pending" if not complete else "Running"
            if ended:
                phase = "Succeeded" if all(run.code == 0 for run in runs) else "Failed"
        ready = complete and not ended and all(run.ready for run in runs)
        reason = "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
        conditions = [_condition("PodScheduled", True), _condition("PodReadyToStartContainers", True),
                      _condition("Initialized", complete), _condition("ContainersReady", ready, reason),
                      _condition("Ready", ready and not self.object["metadata"].get("deletionTimestamp"), reason)]
        status = {"phase": phase, "hostIP": isolated.NODE_ADDRESS, "hostIPs": [{"ip": isolated.NODE_ADDRESS}],
                  "podIP": self.address, "podIPs": [{"ip": self.address}], "startTime": self.started_at,
                  "containerStatuses": statuses, "initContainerStatuses": init or None, "conditions": conditions}
        plain = {**status, "conditions": [(one["type"], one["status"]) for one in conditions]}
        if plain == self.reported:
            return
        try:
            self.node.api.patch(f"{self.path}/status", {"metadata": {"uid": self.meta["uid"]}, "status": status})
            self.reported = plain
        except ApiError as error:
            if error.status in (404, 409):
                self.gone = error.status == 404 or self.gone
            else:
                self.node.say(f"{self.name}: {error}")

    def _container_status(self, spec, waiting):
        run = self.runs.get(spec["name"])
        status = {"name": spec["name"], "image": spec["image"], "imageID": f"parts://{spec['image']}",
                  "ready": bool(run and run.ready), "started": bool(run and run.startup_passed),
                  "restartCount": run.restarts if run else 0, "lastState": {}}
        if run is None:
            status["state"] = {"waiting": {"reason": waiting or "PodInitializing"}}
        elif run.code is None:
            status["state"] = {"running": {"startedAt": run.started_at}}
            status["containerID"] = f"parts://{self.meta['uid']}/{spec['name']}/{run.restarts}"
        elif run.will_restart():
            status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": f"exit code {run.code}"}}
        else:
            status["state"] = {"terminated": {"exitCode": run.code, "startedAt": run.started_at,
                                              "reason": "Completed" if run.code == 0 else "Error",
                                              "finishedAt": run.ended_at}}
        return status


def _condition(kind, holds, reason=None):
    condition = {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": timestamp()}
    if not holds and reason:
        condition["reason"] = reason
    return condition


def _ip(line):
    subprocess.run(["ip", *line.split()], check=True)
