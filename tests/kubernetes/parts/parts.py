#!/usr/bin/env python3
"""Real Kubernetes and Envoy Gateway for the tests, as processes of this machine. See README.md beside this file.

Lives here: the command line and the context manager `Parts`. Never here: how a part works.
Invariant: whatever `Parts` started has ended when it is left, and when its parent process dies.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gateway  # noqa: E402
import isolated  # noqa: E402
from cluster import Cluster  # noqa: E402
from fetch import GROUPS, FetchError, fetch  # noqa: E402
from processes import Child, StartError  # noqa: E402

# Images of other people that charts use for small jobs: the machine's own programs stand for them.
TOOL_IMAGES = {"busybox": {"entrypoint": [], "args": ["sh"]}, "alpine": {"entrypoint": [], "args": ["sh"]},
               "curlimages/curl": {"entrypoint": ["curl"]}}


class Parts:
    """A running control plane; with `node`, pods run; with `gateway`, Envoy Gateway runs. A context manager.

    `images` maps a part of an image's name to the program that stands for it: a path, or a dict with `entrypoint`,
    `args`, `files` {path in the container: path here}, `user`.
    """

    def __init__(self, folder, node=False, with_gateway=False, images=None, gateway_values=None):
        self.folder = pathlib.Path(folder).resolve()
        self.with_node, self.with_gateway = node or with_gateway, with_gateway
        self.images, self.gateway_values = images or {}, gateway_values
        self.programs, self.cluster, self.node = {}, None, None
        self.seconds = {}

    def __enter__(self):
        if self.with_node and not isolated.inside():
            raise StartError("node: expected to run under `parts.py isolated`, found the machine's own network")
        wanted = dict.fromkeys(GROUPS["cluster"] + (GROUPS["gateway"] if self.with_gateway else ()))
        self.programs = self._timed("fetch", lambda: fetch(wanted))
        self.folder.mkdir(parents=True, exist_ok=True)
        address = isolated.NODE_ADDRESS if isolated.inside() else "127.0.0.1"
        self.cluster = Cluster(self.folder, self.programs, address, 6443 if isolated.inside() else None)
        try:
            self._timed("cluster", self.cluster.start)
            if self.with_node:
                self._timed("node", self._start_node)
            if self.with_gateway:
                self._timed("gateway", lambda: gateway.install(self.programs, self.cluster.kubeconfig, self.folder,
                                                               self.gateway_values))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.node:
            self.node.stop(grace=10.0)
            self.node = None
        self.cluster.stop()

    def environment(self):
        """Environment for programs that use the cluster: KUBECONFIG, and helm and kubectl first on the PATH."""
        binaries = self.folder / "bin"
        binaries.mkdir(exist_ok=True)
        for name in ("helm", "kubectl"):
            link = binaries / name
            link.unlink(missing_ok=True)
            link.symlink_to(self.programs[name])
        helm = {f"HELM_{kind}_HOME": str(self.folder / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return dict(os.environ, KUBECONFIG=str(self.cluster.kubeconfig), SIDESTEP_PARTS=str(self.folder / "parts.json"),
                    PATH=f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}", **helm)

    def describe(self):
        """What a test in another language needs to know; also written to `parts.json` in the folder."""
        children = [*self.cluster.children, *([self.node] if self.node else [])]
        found = {
            "folder": str(self.folder), "kubeconfig": str(self.cluster.kubeconfig),
            "server": f"https://{self.cluster.address}:{self.cluster.port}", "ca": str(self.cluster.ca),
            "isolated": isolated.inside(), "node": bool(self.node), "gateway": self.with_gateway,
            "pids": {child.name: child.pid for child in children},
            "resident_kib": {child.name: child.resident_kib() for child in children},
            "programs": {name: str(path) for name, path in self.programs.items()},
            "seconds": self.seconds,
        }
        (self.folder / "parts.json").write_text(json.dumps(found, indent=1))
        return found

    def _start_node(self):
        images = dict(TOOL_IMAGES)
        if self.with_gateway:
            images |= gateway.images(self.programs)
        images |= {name: _image(value) for name, value in self.images.items()}
        (self.folder / "images.json").write_text(json.dumps(images, indent=1))
        cluster = self.cluster
        connection = self.folder / "pki" / "node.json"
        connection.touch(mode=0o600)
        connection.write_text(json.dumps({"host": cluster.address, "port": cluster.port, "ca": str(cluster.ca),
                                          "token": cluster.token}))
        ready = self.folder / "node.ready"
        ready.unlink(missing_ok=True)
        self.node = Child("node", [sys.executable, pathlib.Path(__file__).with_name("node.py"), "--connection",
                                   connection, "--images", self.folder / "images.json", "--folder", self.folder],
                          self.folder)
        self.node.wait_until(ready.exists, 30)

    def _timed(self, what, action):
        started = time.monotonic()
        result = action()
        self.seconds[what] = round(time.monotonic() - started, 2)
        return result


def _image(value):
    if isinstance(value, dict):
        return value
    name = pathlib.Path(value).name
    return {"entrypoint": [f"/app/bin/{name}"], "files": {f"/app/bin/{name}": str(pathlib.Path(value).resolve())}}


# ---- command line --------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("fetch", help="obtain parts into the cache and print their paths as JSON")
    one.add_argument("names", nargs="*", default=["all"], help=f"{', '.join(GROUPS)} or single programs")
    one = commands.add_parser("up", help="start, print one line of JSON, end on SIGTERM or with the parent process; "
                                         "SIGUSR1 restarts the API server with its history compacted")
    one.add_argument("--dir", help="folder for state and logs (default: a temporary one, removed at the end)")
    one.add_argument("--node", action="store_true", help="run pods (needs `isolated`)")
    one.add_argument("--gateway", action="store_true", help="install Envoy Gateway (needs `isolated`)")
    one.add_argument("--image", action="append", default=[], metavar="NAME=PROGRAM",
                     help="the program that stands for images whose name contains NAME")
    one.add_argument("run", nargs=argparse.REMAINDER, help="-- command: run it against the cluster, then end")
    one = commands.add_parser("isolated", help="run a command in private namespaces")
    one.add_argument("run", nargs=argparse.REMAINDER, help="-- command")
    arguments = parser.parse_args()
    try:
        return {"fetch": _fetch, "up": _up, "isolated": _isolated}[arguments.command](arguments)
    except (FetchError, StartError, RuntimeError) as error:
        print(f"parts: {error}", file=sys.stderr)
        return 1


def _fetch(arguments):
    names = [name for word in arguments.names for name in GROUPS.get(word, (word,))]
    print(json.dumps({name: str(path) for name, path in fetch(dict.fromkeys(names)).items()}, indent=1))
    return 0


def _isolated(arguments):
    command = arguments.run[1:] if arguments.run[:1] == ["--"] else arguments.run
    if not command:
        raise StartError("isolated: expected a command after --, found none")
    return isolated.run(command)


def _up(arguments):
    command = arguments.run[1:] if arguments.run[:1] == ["--"] else arguments.run
    ended, restart = threading.Event(), threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: restart.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    parent = os.getppid()
    folder = arguments.dir or tempfile.mkdtemp(prefix="sidestep-parts-")
    images = dict(pair.split("=", 1) for pair in arguments.image)
    try:
        with Parts(folder, arguments.node, arguments.gateway, images) as parts:
            print(json.dumps(parts.describe()), file=sys.stderr if command else sys.stdout, flush=True)
            if command:
                return subprocess.run(command, env=parts.environment(), check=False).returncode & 0xFF
            parts.environment()
            while not ended.wait(0.2) and os.getppid() == parent:
                if restart.is_set():
                    restart.clear()
                    parts.cluster.restart_apiserver()
                    print(json.dumps(parts.describe()), flush=True)
            return 0
    finally:
        if not arguments.dir:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
