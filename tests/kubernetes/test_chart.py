"""What the chart renders from many values, held against the real API server; what it refuses.

Lives here: lint, schemas of every kind (core, Gateway API, Envoy Gateway, our own, other people's), Pod Security,
rights, what is told to restart. Never here: running anything (`test_e2e.py`).
Invariant: every object is judged by the server that would have to take it, strictly, without being kept.
"""

import json
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

import suite
from harness import CHART, HERE, ROOT, binary

NAMESPACE = "matrix"
VALUES = sorted((HERE / "values").glob("*.yaml"))

# What is written, and the words that the refusal has to hold.
WRONG = {
    "a_misspelt_key": ("gatway: {mode: envoyGateway}", ["gatway"]),
    "a_misspelt_key_deep_inside": ("policy: {spec: {rules: [{bypass: {type: Always, effectivIslThreshold: 1}}]}}",
                                   ["/policy/spec/rules/0/bypass", "effectivIslThreshold"]),
    "an_unknown_mode": ("gateway: {mode: istio}", ["/gateway/mode", "envoyGateway"]),
    "a_word_for_a_number": ("replicas: two", ["/replicas", "integer"]),
    "a_share_above_one": ("telemetry: {sampleRatio: 2}", ["/telemetry/sampleRatio"]),
    "a_broken_digest": ("image: {digest: 'sha256:1'}", ["/image/digest"]),
    "a_number_without_unit": ("limits: {drainTimeout: 30}", ["/limits/drainTimeout"]),
    "too_many_ranks": ("pool: {targetPorts: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", ["/pool/targetPorts"]),
    "a_pod_without_role": ("pods: {static: [{name: a, address: '10.0.0.1:8000'}]}", ["/pods/static/0", "role"]),
    "a_role_that_means_nothing": ("pods: {kubernetes: {roles: {a: encode}}}", ["/pods/kubernetes/roles/a"]),
    "an_unquoted_off": ("pods: {kubernetes: {template: {probe: off}}}", ["/pods/kubernetes/template/probe"]),
    "no_engine_labels": ("pool: {selector: {}}", ["pool.selector"]),
    "no_gateway": ("gateway: {mode: envoyGateway}", ["gateway.route.parentRefs"]),
    "no_secret": ("tls: {mode: secret}", ["tls.secretName"]),
    "no_issuer": ("tls: {mode: certManager}", ["tls.certManager.issuerRef.name"]),
    "a_pool_over_plaintext": ("{gateway: {mode: aiGateway, route: {parentRefs: [{name: a}]}}, tls: {mode: plaintext}}",
                              ["tls.mode"]),
}


def objects(text):
    return [one for one in yaml.safe_load_all(text) if one]


def config_files(rendered):
    """The files that the picker's containers would see."""
    return {name: text for one in rendered if one["kind"] == "ConfigMap" and "-dashboards" not in one["metadata"]["name"]
            for name, text in one["data"].items() if name.endswith(".yaml")}


class Chart(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = suite.cluster()
        cls.cluster.namespace(NAMESPACE)
        suite.definitions()

    def render(self, values, *arguments, fails=False):
        """`helm template`; `values` is a path or text."""
        given = None if isinstance(values, pathlib.Path) else values
        return self.cluster.helm("template", "release", CHART, "--namespace", NAMESPACE, "--values",
                                 "-" if given is not None else values, *arguments, given=given, fails=fails)

    def take(self, one):
        """The server's opinion of an object, given as to `kubectl apply`, without keeping it."""
        return self.cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", given=json.dumps(one))

    def good(self, path):
        self.cluster.helm("lint", "--strict", CHART, "--values", path)
        rendered = objects(self.render(path))
        for one in rendered:
            with self.subTest(kind=one["kind"], name=one["metadata"]["name"]):
                self.assertEqual(one["metadata"].get("namespace", NAMESPACE) in (NAMESPACE, "default"), True)
                self.take(one)
                if one["kind"] == "Deployment":
                    # Pod Security is enforced on pods, so the pod itself is shown to the server.
                    template = one["spec"]["template"]
                    spec = dict(template["spec"], serviceAccountName="default", priorityClassName=None)
                    self.take({"apiVersion": "v1", "kind": "Pod", "spec": spec,
                               "metadata": {**template["metadata"], "name": "picker", "namespace": NAMESPACE}})
        self.check(config_files(rendered))

    def check(self, files):
        """The program's own opinion of its config; files that come from elsewhere are empty ones."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("tls.crt", "tls.key", "tokenizer.json"):
                pathlib.Path(folder, name).write_text("{}")
            for name, text in files.items():
                text = re.sub(r"/etc/sidestep-tls/|/models/llama/", f"{folder}/", text)
                pathlib.Path(folder, name).write_text(text)
            done = subprocess.run([str(binary()), "check", f"{folder}/sidestep.yaml"], text=True, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(done.returncode, 0, done.stdout)

    def deployment(self, values):
        return next(one for one in objects(self.render(values)) if one["kind"] == "Deployment")

    # ---- what is told to restart: field report 37 --------------------------------------------------------------

    def test_a_policy_change_leaves_the_pods_alone_and_is_mounted_where_it_is_watched(self):
        values = "{pods: {source: static}, policy: {source: configMap, spec: {rules: [{bypass: {type: IslBounding, " \
                 "effectiveIslThreshold: %d}}]}}}"
        one, other = values % 2048, values % 1024
        self.assertEqual(self.deployment(one), self.deployment(other))
        self.assertNotEqual(config_files(objects(self.render(one)))["policy.yaml"],
                            config_files(objects(self.render(other)))["policy.yaml"])
        volume = self.deployment(one)["spec"]["template"]["spec"]["volumes"][0]
        self.assertIn({"configMap": {"name": "release-sidestep-policy"}}, volume["projected"]["sources"])

    def test_a_process_config_change_restarts_the_pods(self):
        checksum = lambda values: self.deployment(values)["spec"]["template"]["metadata"]["annotations"]
        base = "{pool: {selector: {app: a}}, %s}"
        self.assertNotEqual(checksum(base % "limits: {inFlight: 4096}"), checksum(base % "limits: {inFlight: 10}"))

    def test_a_replica_count_restarts_nothing(self):
        base = "{pool: {selector: {app: a}}, replicas: %d}"
        one, other = (self.deployment(base % count)["spec"]["template"] for count in (2, 5))
        self.assertEqual(one, other)

    # ---- rights: field report 38 -------------------------------------------------------------------------------

    def test_the_role_holds_what_the_program_uses_and_nothing_else(self):
        for sources, arguments in (("{}", []), ("{policy: {source: configMap}, pool: {selector: {app: a}}}", ["--pods-only"])):
            values = sources if sources != "{}" else "pool: {selector: {app: a}}"
            with self.subTest(arguments=arguments):
                told = subprocess.run([str(binary()), "rights", *arguments], stdout=subprocess.PIPE, text=True, check=True)
                role = next(one for one in objects(self.render(values)) if one["kind"] == "Role")
                self.assertEqual(flat(role), flat(json.loads(told.stdout)))

    def test_without_the_api_there_are_no_rights_and_no_token(self):
        rendered = objects(self.render(HERE / "values" / "08-without-kubernetes-api.yaml"))
        self.assertFalse([one for one in rendered if one["kind"] in ("Role", "RoleBinding", "ClusterRole")])
        deployment = next(one for one in rendered if one["kind"] == "Deployment")
        self.assertFalse(deployment["spec"]["template"]["spec"]["automountServiceAccountToken"])

    def test_nothing_is_made_for_the_whole_cluster(self):
        for path in VALUES:
            kinds = {one["kind"] for one in objects(self.render(path))}
            self.assertFalse({kind for kind in kinds if kind.startswith("Cluster")}, path.name)

    # ---- what holds the chart and the program together ---------------------------------------------------------

    def test_the_grace_period_outlasts_the_drain(self):
        for drain, least in (("30s", 30), ("5m", 300), ("1m30s", 90), ("1500ms", 2)):
            spec = self.deployment(f"{{pool: {{selector: {{app: a}}}}, limits: {{drainTimeout: {drain}}}}}")["spec"]
            grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
            before = spec["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            self.assertEqual(grace, least + before + 15, drain)

    def test_headers_that_are_removed_early_are_those_that_no_client_may_send(self):
        rendered = objects(self.render(HERE / "values" / "02-envoy-gateway.yaml"))
        policy = next(one for one in rendered if one["kind"] == "ClientTrafficPolicy")
        removed = set(policy["spec"]["headers"]["earlyRequestHeaders"]["remove"])
        readme = (ROOT / "README.md").read_text()
        rows = re.findall(r"^\| (.*) \| (picker → gateway|picker → pod|picker → pod, client|removed) \|", readme, re.M)
        known = {name for row, _ in rows for name in re.findall(r"`([^` /]+)`", row)}
        self.assertFalse(removed - known, "removed early, and unknown to the picker")
        self.assertIn("x-gateway-destination-endpoint", removed)
        self.assertFalse({name for name in known if name.startswith(("x-sidestep", "x-gateway-destination"))} - removed)

    def test_definitions_are_those_that_the_program_prints(self):
        told = subprocess.run([str(binary()), "crd"], stdout=subprocess.PIPE, text=True, check=True).stdout
        for folder in (CHART / "crds", ROOT / "manifests" / "kubernetes" / "base"):
            suite.same(folder / "disaggregationpolicies.yaml", told)

    def test_the_values_know_every_key_of_a_policy(self):
        definition = yaml.safe_load((CHART / "crds" / "disaggregationpolicies.yaml").read_text())
        spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        schema = json.loads((CHART / "values.schema.json").read_text())
        self.assertEqual(keys(schema["definitions"]["policy"]), keys(spec))

    def test_every_section_of_the_schema_refuses_other_keys_or_is_passed_on_as_it_is(self):
        schema = json.loads((CHART / "values.schema.json").read_text())
        loose = [path for path, node in sections(schema) if "additionalProperties" not in node]
        self.assertEqual(loose, ["/properties/global", "/definitions/kubernetes"])

    def test_no_value_is_without_meaning(self):
        templates = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
        unused = [key for key in yaml.safe_load((CHART / "values.yaml").read_text())
                  if f".Values.{key}" not in templates]
        self.assertFalse(unused)


def flat(role):
    """Group, resource and verb of every right; `resourceNames` narrow a right and are left out."""
    return {(group, resource, verb) for rule in role["rules"] for group in rule["apiGroups"]
            for resource in rule["resources"] for verb in rule["verbs"]}


def keys(schema, path=""):
    """The paths of all keys in a schema; lists are looked through."""
    found = set()
    for name, node in (schema.get("items", schema).get("properties") or {}).items():
        found |= {path + name} | keys(node, f"{path}{name}.")
    return found


def sections(node, path=""):
    """Every object in a schema with its place."""
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for name, child in node.items():
            yield from sections(child, f"{path}/{name}")
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from sections(child, f"{path}/{number}")


def _good(path):
    return lambda self: self.good(path)


def _wrong(text, words):
    def test(self):
        base = "" if "pool:" in text else "pool: {selector: {app: a}}\n"
        values = json.dumps({**(yaml.safe_load(base) or {}), **yaml.safe_load(text)})
        said = self.render(values, fails=True)
        for word in words:
            self.assertIn(word, said)
    return test


for _path in VALUES:
    setattr(Chart, f"test_values_{_path.stem.replace('-', '_')}", _good(_path))
for _name, (_text, _words) in WRONG.items():
    setattr(Chart, f"test_refused_{_name}", _wrong(_text, _words))


if __name__ == "__main__":
    unittest.main()
