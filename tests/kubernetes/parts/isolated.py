"""A private network, process and mount namespace: the machine that a test cluster's node pretends to be.

Lives here: entering it and its addresses. Never here: what runs inside.
Invariant: nothing inside can be reached from outside or reach out, and all of it ends when the first process does.

Why it exists: Kubernetes refuses loopback addresses as endpoints, and Envoy Gateway's controller has fixed ports. In
here a bridge with a private range carries pods, so both are as in a real cluster, and two runs never meet.
"""

import os
import pathlib
import signal
import subprocess
import sys

from processes import die_with_parent

MARK = "SIDESTEP_PARTS_ISOLATED"
BRIDGE = "br0"
NODE_ADDRESS = "10.77.0.1"
POD_PREFIX = 16
LOAD_BALANCER_RANGE = "10.79.0.0/16"
# Every address of these ranges is local to the node: Services and load balancers are served by `services.py`.
LOCAL_RANGES = ("10.78.0.0/16", LOAD_BALANCER_RANGE)


def inside():
    return os.environ.get(MARK) == "1"


def run(arguments):
    """Runs `arguments` in new namespaces and returns the exit status. Needs root for pods; without it only the
    control plane works, in a user namespace.

    SIGTERM and SIGINT end all of it at once, and so does the end of this process.
    """
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
               "--propagation", "private"]
    if os.geteuid() != 0:
        command.insert(1, "--map-root-user")
    setup = [sys.executable, str(pathlib.Path(__file__).resolve())]
    outside = subprocess.Popen([*command, "--", *setup, *arguments], preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        # unshare itself ignores both while it waits
        signal.signal(number, lambda *_: outside.kill())
    return outside.wait() & 0xFF


def set_up_network():
    """Loopback, the pods' bridge and the routes that make the Service ranges local."""
    for line in ("link set lo up",
                 f"link add {BRIDGE} type bridge forward_delay 0",
                 f"addr add {NODE_ADDRESS}/{POD_PREFIX} dev {BRIDGE}",
                 f"link set {BRIDGE} up",
                 *(f"route add local {range_} dev lo" for range_ in LOCAL_RANGES)):
        subprocess.run(["ip", *line.split()], check=True)


def main(arguments):
    set_up_network()
    # Not exec: as the namespace's first process this one also reaps what its children leave behind.
    child = subprocess.Popen(arguments, env=dict(os.environ, **{MARK: "1"}))
    while True:
        try:
            pid, status = os.wait()
        except InterruptedError:
            continue
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
