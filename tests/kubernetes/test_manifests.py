"""What is there for those who do not use Helm: rendered from the chart, and held against it.

Lives here: how the manifests are rendered, and what the server, the program and Envoy say of them and of the Compose
files. Never here: what the chart renders from other values (`test_chart.py`).
Invariant: a manifest that is not what the chart renders fails; SIDESTEP_BLESS=1 writes it.
"""

import ipaddress
import json
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

import suite
from harness import CHART, ROOT, binary

MANIFESTS = ROOT / "manifests"
HEAD = "# Rendered from charts/sidestep; SIDESTEP_BLESS=1 tests/run kubernetes writes it anew.\n"
VALUES = {"pool": {"selector": {"app": "vllm"}}, "gateway": {"mode": "envoyGateway", "gateway": {"create": True}}}
# What belongs to the gateway; the rest is the base.
GATEWAY = ("envoy-gateway.yaml", "engines.yaml")
# What only Helm can use.
HELM_ONLY = ("tests/request.yaml",)


class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = suite.cluster()
        suite.definitions()

    def rendered(self):
        """The chart's objects without what only Helm needs: texts of the base and of the gateway."""
        text = self.cluster.helm("template", "sidestep", CHART, "--namespace", "sidestep", "--values", "-",
                                 given=json.dumps(VALUES))
        texts = {False: [], True: []}
        for part in re.split(r"^---\n", text, flags=re.M):
            source = re.search(r"^# Source: sidestep/templates/(\S+)\n", part)
            if not source or source[1] in HELM_ONLY:
                continue
            lines = [line for line in part[source.end():].rstrip().splitlines()
                     if not re.match(r"\s*(helm\.sh/chart:|app\.kubernetes\.io/managed-by:)", line)]
            texts[source[1] in GATEWAY].append("\n".join(lines) + "\n")
        return {name: HEAD + "---\n".join(texts[gateway]) for name, gateway in
                (("base/sidestep.yaml", False), ("envoy-gateway/gateway.yaml", True))}

    def test_manifests_are_what_the_chart_renders(self):
        for name, text in self.rendered().items():
            suite.same(MANIFESTS / "kubernetes" / name, text)

    def test_kustomize_builds_them_and_the_server_takes_every_object(self):
        built = self.cluster.kubectl("kustomize", MANIFESTS / "kubernetes" / "envoy-gateway")
        objects = [one for one in yaml.safe_load_all(built) if one]
        namespace = next(one for one in objects if one["kind"] == "Namespace")
        self.cluster.apply(namespace)
        for one in objects:
            if one["kind"] != "Namespace":
                self.cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "--server-side",
                                     "--force-conflicts", "-f", "-", given=json.dumps(one))

    def test_compose_files_agree_with_each_other(self):
        folder = MANIFESTS / "compose"
        compose = yaml.safe_load((folder / "compose.yaml").read_text())
        services = compose["services"]
        addresses = {name: one["networks"]["pods"]["ipv4_address"] for name, one in services.items()}
        network = ipaddress.ip_network(compose["networks"]["pods"]["ipam"]["config"][0]["subnet"])
        self.assertTrue(all(ipaddress.ip_address(address) in network for address in addresses.values()))
        pods = yaml.safe_load((folder / "pods.yaml").read_text())["pods"]
        self.assertEqual({pod["name"]: pod["address"] for pod in pods},
                         {name: f"{address}:8000" for name, address in addresses.items() if "code" in name or "fill" in name})
        envoy = (folder / "envoy.yaml").read_text()
        reached = set(re.findall(r'address: "(172[^"]*)"', envoy))
        self.assertEqual(reached, {addresses[name] for name in ("picker", "decode-1", "decode-2")})
        for one in services.values():
            for volume in one.get("volumes", []):
                self.assertTrue((folder / volume.split(":")[0]).exists(), volume)
            if "build" in one:
                root = (folder / one["build"]["context"]).resolve()
                self.assertTrue((root / one["build"]["dockerfile"]).exists())
                self.assertEqual(root, ROOT)

    def test_compose_configs_are_valid_to_the_program_and_to_envoy(self):
        folder = MANIFESTS / "compose"
        for command in ([binary(), "check", folder / "sidestep.yaml"],
                        [self.cluster.parts.programs["envoy"], "--mode", "validate", "-c", folder / "envoy.yaml"]):
            self.cluster.run(command)

    def test_compose_envoy_differs_from_the_example_in_addresses_only(self):
        without = [re.sub(r'address: "[0-9.]+"', "", path.read_text())
                   for path in (MANIFESTS / "compose" / "envoy.yaml", MANIFESTS / "envoy" / "full-duplex.yaml")]
        self.assertEqual(*without)

    def test_simulated_engines_take_the_arguments_that_compose_gives_them(self):
        compose = yaml.safe_load((MANIFESTS / "compose" / "compose.yaml").read_text())
        for name, one in compose["services"].items():
            if one.get("command", [""])[0] == "engine":
                # An address that is not of this machine: refused only after every argument was understood.
                said = self.cluster.run([binary(), *one["command"]], fails=True)
                self.assertIn("--listen 172.28.0.", said, name)

    def test_the_image_holds_every_file_that_cargo_asks_for(self):
        ignore = (MANIFESTS / "docker" / "Dockerfile.dockerignore").read_text().split()
        allowed = [line[1:] for line in ignore if line.startswith("!")]
        manifest = (ROOT / "Cargo.toml").read_text()
        targets = re.findall(r'^path = "([^"]+)"', manifest, re.M)
        self.assertTrue(targets)
        for path in targets:
            self.assertTrue(any(pathlib.PurePath(path).match(rule) or path.startswith(f"{rule}/") for rule in allowed), path)
        dockerfile = (MANIFESTS / "docker" / "Dockerfile").read_text()
        profile = re.search(r"--profile (\w+)", dockerfile)[1]
        self.assertIn(f"[profile.{profile}]", manifest)
        self.assertIn(f"target/{profile}/sidestep", dockerfile)
        self.assertRegex(dockerfile, r"USER [1-9]\d*:[1-9]\d*")
        outside = [path for path in (ROOT / "src").rglob("*.rs")
                   if re.search(r'include_(str|bytes)!\("(\.\./)+(tests|docs|manifests)', path.read_text())
                   and "#[cfg(test)]" not in path.read_text() and path.name != "tests.rs"]
        self.assertEqual(outside, [], "these need files that the image build does not see")


if __name__ == "__main__":
    unittest.main()
