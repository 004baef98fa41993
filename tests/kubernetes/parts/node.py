"""The cluster's one node: every pod of the cluster runs here, as processes of this machine.

Lives here: the Node object, the pods' addresses, which program stands for which image, the entry point.
Never here: a pod's life (`pod.py`), Services and names (`services.py`).
Invariant: it runs inside `isolated.py`'s namespaces only; a pod's address is never used twice.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import threading

sys.dont_write_bytecode = True

import isolated  # noqa: E402
import services  # noqa: E402
from api import Api, ApiError, follow  # noqa: E402
from cluster import KUBERNETES_SERVICE  # noqa: E402
from pod import Pod  # noqa: E402

NAME = "parts"
STOP_SECONDS = 5.0


class Node:
    """Follows the pods and gives each its thread."""

    def __init__(self, api, folder, images):
        self.api, self.folder, self.images = api, pathlib.Path(folder), images
        self.name, self.service_host = NAME, KUBERNETES_SERVICE
        self.stopped = threading.Event()
        self.pods, self.last_address, self.lock = {}, 0, threading.Lock()

    def register(self):
        self.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {
            "name": NAME, "labels": {"kubernetes.io/hostname": NAME, "kubernetes.io/os": "linux"}}})
        amounts = {"cpu": "64", "memory": "256Gi", "pods": "1000", "ephemeral-storage": "100Gi"}
        self.api.patch(f"/api/v1/nodes/{NAME}", {"spec": {"taints": None}})
        self.api.patch(f"/api/v1/nodes/{NAME}/status", {"status": {
            "capacity": amounts, "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": isolated.NODE_ADDRESS}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "PartsReady"}]}})

    def run(self):
        follow(self.api, "/api/v1/pods", self.halted, self._changed, self._deleted, self._seen)

    def end(self):
        """Ends every pod's processes; the API keeps the pods, as when a node is lost."""
        with self.lock:
            pods = list(self.pods.values())
        for pod in pods:
            pod.stop()
        for pod in pods:
            pod.join(STOP_SECONDS)

    def image(self, name):
        """The program that stands for an image: the longest key that the image's name contains; None: pretend."""
        fitting = [key for key in self.images if key in name]
        return self.images[max(fitting, key=len)] if fitting else None

    def take_address(self):
        with self.lock:
            self.last_address += 1
            third, fourth = divmod(self.last_address - 1, 250)
        return f"10.77.{1 + third}.{1 + fourth}"

    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    def halted(self, seconds=0.0):
        return self.stopped.wait(seconds) if seconds else self.stopped.is_set()

    def _changed(self, found):
        uid = found["metadata"]["uid"]
        with self.lock:
            pod = self.pods.get(uid)
            if pod is None:
                if found.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                    return
                pod = self.pods[uid] = Pod(self, found)
                pod.start()
                return
        if not pod.update(found) and "deletionTimestamp" in found["metadata"]:
            self._finish(found)

    def _finish(self, found):
        """Confirms the deletion of a pod whose thread has already ended."""
        meta = found["metadata"]
        try:
            self.api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}",
                            {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
                             "preconditions": {"uid": meta["uid"]}})
        except ApiError as error:
            if error.status not in (404, 409):
                self.say(str(error))

    def _deleted(self, found):
        with self.lock:
            pod = self.pods.pop(found["metadata"]["uid"], None)
        if pod:
            pod.vanish()

    def _seen(self, uids):
        with self.lock:
            lost = [self.pods.pop(uid) for uid in list(self.pods) if uid not in uids]
        for pod in lost:
            pod.vanish()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connection", required=True, help="JSON: host, port, ca, token")
    parser.add_argument("--images", required=True, help="JSON: image name part -> program")
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()
    connection = json.loads(pathlib.Path(arguments.connection).read_text())
    images = json.loads(pathlib.Path(arguments.images).read_text())
    api = Api(connection["host"], connection["port"], connection["ca"], connection["token"])
    shutil.rmtree(pathlib.Path(arguments.folder) / "pods", ignore_errors=True)
    node = Node(api, arguments.folder, images)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stopped.set())
    node.register()
    services.start(api, node.halted)
    threading.Thread(target=node.run, daemon=True).start()
    (pathlib.Path(arguments.folder) / "node.ready").touch()
    node.stopped.wait()
    node.end()
    os._exit(0)


if __name__ == "__main__":
    main()
