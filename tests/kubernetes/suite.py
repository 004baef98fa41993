#!/usr/bin/env python3
"""Runs the Kubernetes tests: tests/kubernetes/suite.py [NAME ...], names as unittest takes them, e.g. test_e2e.Life

Tests that import this module share one real cluster with a real Envoy Gateway in a private network (see
`parts/README.md`); the others start what they need themselves. Ends with `N passed, N failed`. Needs root, Go and Python 3.11.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True

import harness  # noqa: E402 (first: it puts the parts on the path)
import fetch  # noqa: E402
import foreign  # noqa: E402
import isolated  # noqa: E402
import parts  # noqa: E402

YAML = "pyyaml==6.0.3"
_CLUSTER = None


def cluster():
    """The cluster that the running suite started."""
    if _CLUSTER is None:
        raise unittest.SkipTest("needs the cluster that suite.py starts")
    return _CLUSTER


def definitions():
    """Installs the kinds that the chart makes objects of and that Envoy Gateway does not bring."""
    paths = [harness.HERE / "parts" / "inferencepool.crd.yaml", *(harness.CHART / "crds").glob("*.yaml"),
             *os.environ["SIDESTEP_DEFINITIONS"].split(os.pathsep)]
    for path in paths:
        cluster().kubectl("apply", "--server-side", "-f", str(path))
    cluster().kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")


def same(path, wanted):
    """Fails when a generated file is not what it should be; with SIDESTEP_BLESS=1 writes it instead."""
    if os.environ.get("SIDESTEP_BLESS"):
        path.write_text(wanted)
    found = path.read_text() if path.exists() else ""
    if found != wanted:
        raise AssertionError(f"{path}: expected what is generated, found something else; run with SIDESTEP_BLESS=1")


def main():
    names = sys.argv[1:] or sorted(path.stem for path in harness.HERE.glob("test_*.py"))
    if isolated.inside():
        return _inside(names)
    if os.geteuid() != 0:
        print("kubernetes: expected root, which network namespaces for pods need, found another user", file=sys.stderr)
        return 1
    program = harness.binary()
    if not program.exists():
        print(f"kubernetes: expected {program}, built by `cargo build`, found nothing", file=sys.stderr)
        return 1
    # Here, where the network is.
    fetch.fetch(dict.fromkeys(fetch.GROUPS["all"]))
    os.environ["SIDESTEP"] = str(program)
    os.environ["SIDESTEP_DEFINITIONS"] = os.pathsep.join(map(str, foreign.definitions()))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_yaml()), os.environ.get("PYTHONPATH")]))
    shared = [name for name in names if _shares(name)]
    own = [name for name in names if name not in shared]
    passed, failed = _run(own) if own else (0, 0)
    if shared:
        with tempfile.NamedTemporaryFile(prefix="sidestep-counts-") as counts:
            os.environ["SIDESTEP_COUNTS"] = counts.name
            isolated.run([sys.executable, os.path.abspath(__file__), *shared])
            told = counts.read().split()
        # A run that died has told nothing.
        passed, failed = (passed + int(told[0]), failed + int(told[1])) if told else (passed, failed + 1)
    print(f"{passed} passed, {failed if passed or failed else 1} failed")
    return 0 if passed and not failed else 1


def _shares(name):
    """Whether a test uses the cluster of this suite; the others start what they need themselves."""
    text = (harness.HERE / f"{name.split('.')[0]}.py").read_text()
    return "import suite" in text or 'sys.modules.get("suite")' in text


def _run(names):
    """How many passed, and how many did not; a skipped test did not."""
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestLoader().loadTestsFromNames(names))
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses) + len(result.skipped)
    return max(0, result.testsRun - bad), bad


def _yaml():
    """A folder with PyYAML, which not every Python has."""
    folder = fetch.cache_root() / f"python-{YAML.replace('==', '-')}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "yaml").exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--only-binary=:all:", "--target", str(folder), YAML], check=True)
    return folder


def _inside(names):
    global _CLUSTER
    folder = tempfile.mkdtemp(prefix="sidestep-kubernetes-")
    try:
        with parts.Parts(folder, with_gateway=True, images={"sidestep": harness.binary()}) as running:
            print(f"parts: started after {running.seconds}", file=sys.stderr, flush=True)
            _CLUSTER = harness.Cluster(running)
            counts = _run(names)
    finally:
        if os.environ.get("SIDESTEP_KEEP"):
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    pathlib.Path(os.environ["SIDESTEP_COUNTS"]).write_text(" ".join(map(str, counts)))
    return 0


if __name__ == "__main__":
    # The tests import this module by name: one module, one cluster.
    sys.modules["suite"] = sys.modules["__main__"]
    sys.exit(main())
