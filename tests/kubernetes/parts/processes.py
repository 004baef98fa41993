"""Child processes: started with a log file, waited for by a condition, ended by their own id.

Lives here: starting, polling, ending. Never here: which program, which flags.
Invariant: a started child is ended by `stop`, and by the kernel if this process dies first.
"""

import ctypes
import pathlib
import signal
import socket
import subprocess
import time

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """A program ended early or did not get ready in time; the message carries the end of its log."""


class Child:
    """One running program with its log."""

    def __init__(self, name, command, folder, env=None):
        self.name = name
        self.log = pathlib.Path(folder) / f"{name}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, env=env, preexec_fn=die_with_parent)

    @property
    def pid(self):
        return self.process.pid

    def wait_until(self, ready, seconds):
        """Polls `ready()` (true, or raises OSError while not yet) until it holds, the child ends, or time is up."""
        deadline = time.monotonic() + seconds
        last = "never answered"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartError(f"{self.name}: expected to run, found exit status {self.process.returncode}\n"
                                 f"{self.tail()}")
            try:
                if ready():
                    return
                last = "not ready"
            except Exception as error:  # noqa: BLE001 - any failure of the probe means "not yet"
                last = str(error)
            time.sleep(0.02)
        raise StartError(f"{self.name}: expected ready within {seconds} s, found {last}\n{self.tail()}")

    def stop(self, grace=5.0):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def tail(self, lines=15):
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def resident_kib(self):
        """Resident memory of the child itself, in KiB."""
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        return 0


def free_port(address="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def die_with_parent():
    """Runs in a child before its program: the kernel kills the child when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
