"""One container of a pod as a process: own mount and process namespace, the pod's network, the pod's security context.

Lives here: the root folder, the user and capabilities, environment, start, exec, end. Never here: when (`pod.py`).
Invariant: the process sees the file tree that the pod declares and nothing writable beyond it.

Not like a real runtime: no cgroup limits, no seccomp filter, and the machine's /usr (read-only) instead of an image.
"""

import os
import pathlib
import re
import shlex
import signal
import subprocess

from processes import die_with_parent

PATH = "/app/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
IMAGE_USER = 65532  # the non-root user of distroless images


class Container:
    """One running instance of `spec`. `image` says which program stands for the container's image."""

    def __init__(self, spec, image, env, mounts, sandbox, folder, security):
        self.spec, self.folder = spec, pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root = self.folder / "root"
        self.root.mkdir(exist_ok=True)
        command = self._command(image, env)
        script = self._script(image, mounts, security, command)
        with open(self.folder / "log", "ab") as log:
            # /dev/stdout is this file: like a container runtime, let the container's user open it again
            os.fchown(log.fileno(), *_user(image, security))
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/proc/{sandbox}/ns/net", f"--ipc=/proc/{sandbox}/ns/ipc",
                 f"--uts=/proc/{sandbox}/ns/uts", "unshare", "--mount", "--pid", "--fork", "--kill-child",
                 "--propagation", "private", "/bin/sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={"PATH": PATH, "HOME": "/", "HOSTNAME": env["HOSTNAME"], **env}, preexec_fn=die_with_parent)

    def exit_code(self):
        """None while it runs."""
        code = self.process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def signal(self, number):
        """Signals the container's first process, which may ignore what it has no handler for, as in any container."""
        pid = self._first()
        if pid:
            try:
                subprocess.run(["kill", f"-{int(number)}", str(pid)], check=False, stderr=subprocess.DEVNULL)
            except OSError:
                pass

    def kill(self):
        self.signal(signal.SIGKILL)
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def run_inside(self, command, seconds):
        """Runs a command among the container's files and processes; its exit status."""
        pid = self._first()
        if not pid:
            return 1
        done = subprocess.run(["nsenter", "-t", str(pid), "-m", "-n", "-p", "-i", "-u", "-r", "--", *command],
                              timeout=seconds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env={"PATH": PATH}, check=False)
        return done.returncode

    def _first(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            found = children.read_text().split()
        except OSError:
            return None
        return int(found[0]) if found else None

    def _command(self, image, env):
        command = self.spec.get("command") or image["entrypoint"]
        arguments = self.spec.get("args")
        if arguments is None:
            arguments = [] if self.spec.get("command") else image.get("args", [])
        return [expand(part, env) for part in [*command, *arguments]]

    def _script(self, image, mounts, security, command):
        root = shlex.quote(str(self.root))
        lines = [
            "set -e", "unset OLDPWD", f"mount -t tmpfs -o mode=755 tmpfs {root}", f"cd {root}",
            "mkdir -p usr proc dev etc tmp run var", "chmod 1777 tmp",
            "for link in bin sbin lib lib64; do ln -s usr/$link $link; done",
            "mount --rbind /usr usr", "mount -o remount,bind,ro usr",
            "mount -t tmpfs -o mode=755 tmpfs dev", "mkdir dev/shm", "chmod 1777 dev/shm",
            "for node in null zero random urandom; do : > dev/$node; mount --bind /dev/$node dev/$node; done",
            "ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr",
            "mount -t proc proc proc",
            "if [ -d /etc/ssl ]; then mkdir etc/ssl; mount --bind /etc/ssl etc/ssl",
            "mount -o remount,bind,ro etc/ssl; fi",
            f"for file in hosts resolv.conf passwd group nsswitch.conf; do cp {shlex.quote(str(self.folder.parent))}"
            "/etc/$file etc/$file; done",
        ]
        for name, source in image.get("files", {}).items():
            lines += _bind(source, name, True, False)
        for target, source, read_only in mounts:
            lines += _bind(source, target, read_only, pathlib.Path(source).is_dir())
        if security.get("readOnlyRootFilesystem"):
            lines.append("mount -o remount,ro .")
        lines.append(f"cd /; exec chroot {root} /usr/bin/env -C {shlex.quote(self.spec.get('workingDir') or '/')} "
                     + " ".join(map(shlex.quote, [*_drop(image, security), *command])))
        return "\n".join(lines)


def _bind(source, target, read_only, folder):
    source, target = shlex.quote(str(source)), shlex.quote(str(target).lstrip("/"))
    make = f"mkdir -p {target}" if folder else f'mkdir -p "$(dirname {target})"; [ -e {target} ] || : > {target}'
    lines = [make, f"mount --rbind {source} {target}"]
    if read_only:
        lines.append(f"mount -o remount,bind,ro {target}")
    return lines


def _user(image, security):
    user = security.get("runAsUser", image.get("user", IMAGE_USER))
    return user, security.get("runAsGroup", image.get("group", user))


def _drop(image, security):
    """The part of a security context that util-linux can apply."""
    user, group = _user(image, security)
    groups = security.get("fsGroup")
    command = ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}",
               f"--groups={groups}" if groups is not None else "--clear-groups"]
    if security.get("allowPrivilegeEscalation") is False:
        command.append("--no-new-privs")
    dropped = [name.lower() for name in security.get("capabilities", {}).get("drop", [])]
    if "all" in dropped:
        kept = [f"+{name.lower()}" for name in security.get("capabilities", {}).get("add", [])]
        command.append("--bounding-set=" + ",".join(["-all", *kept]))
        if kept:
            command += ["--inh-caps=" + ",".join(kept), "--ambient-caps=" + ",".join(kept)]
    return [*command, "--"]


def expand(text, env):
    """`$(NAME)` as the kubelet expands it: unknown names stay, `$$` is one dollar sign."""
    def one(found):
        if found[0] == "$$":
            return "$"
        return env.get(found[1], found[0])
    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", one, text)
