#!/usr/bin/env python3
"""One rule set: a real API server, `sidestep check` and the process refuse the same policies with the same messages.

Runs by itself (`./test_policy.py`, with its own API server) or in a suite that has a cluster.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE / "parts"))

from parts import Parts  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "config" / "policy"
EXAMPLES = ROOT / "manifests" / "policies"
CRD = ROOT / "manifests" / "crds" / "disaggregationpolicies.yaml"
NAMESPACE = "one-rule-set"

YAML = "no YAML, or of another shape: kubectl says so"
NO_JSON = "JSON has no such number: kubectl says so"
TYPE = "a wrong JSON type is refused in the server's own words, before any rule is looked at"
UNKNOWN = "an unknown key is refused in the server's own words"
OBJECT = "what every object has, the server checks itself"
# Refused by the server in other words than ours, and why.
OWN_WORDS = {
    "a-list": YAML, "empty": YAML, "not-utf8": YAML, "only-comments": YAML, "plain-text": YAML, "tab": YAML,
    "unclosed-bracket": YAML,
    "many-faults": NO_JSON, "ratio-infinite": NO_JSON, "ratio-nan": NO_JSON, "scoring-out-of-range": NO_JSON,
    "affinity-header-and-ttl": TYPE, "affinity-off-bare": TYPE, "affinity-off-unquoted-elsewhere": TYPE,
    "pins-boolean": TYPE, "rule-null": TYPE, "ratio-boolean": TYPE, "ratio-list": TYPE, "tokens-2k": TYPE, "tokens-fraction": TYPE, "tokens-huge": TYPE,
    "tokens-quoted": TYPE,
    "fault-behind-alias": UNKNOWN, "misspelt-key": UNKNOWN, "misspelt-key-snake-case": UNKNOWN,
    "number-as-key": UNKNOWN, "rules-not-a-list": UNKNOWN, "unknown-key-far-from-all": UNKNOWN,
    "name-missing": OBJECT, "name-not-dns": OBJECT, "old-api-version": OBJECT, "other-kind": OBJECT,
    "process-config-as-policy": OBJECT,
}
# What the server does not get to see.
NEVER_SENT = {
    "duplicate-key": "kubectl sends the last of them", "duplicate-section": "kubectl sends the last of them",
    "merge-key": "kubectl resolves it", "tagged": "kubectl drops the tag",
    "two-documents": "kubectl sends two objects", "shadow-missing-file": "a server has no files",
}
# Files that do not say that they are policies: `check` takes them for something else, the process cannot.
NO_KIND = {"a-list", "empty", "only-comments", "other-kind", "plain-text", "process-config-as-policy"}


def binary():
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    return pathlib.Path(os.environ.get("SIDESTEP_BINARY") or target / "debug" / "sidestep").resolve()


class Policy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-policy-")))
        suite = sys.modules.get("suite")
        if suite is None:
            cls.environment = cls.enterClassContext(Parts(cls.folder / "parts")).environment()
        else:
            cls.environment = suite.cluster().environment
        cls.kubectl("apply", "--server-side", "--force-conflicts", "-f", CRD)
        cls.kubectl("wait", "crd/disaggregationpolicies.sidestep.dev", "--for=condition=Established", "--timeout=30s")
        cls.kubectl("create", "namespace", NAMESPACE)

    @classmethod
    def tearDownClass(cls):
        cls.kubectl("delete", "namespace", NAMESPACE, "--wait=false")

    @classmethod
    def kubectl(cls, *arguments, given=None):
        code, output = cls.try_kubectl(*arguments, given=given)
        if code != 0:
            raise AssertionError(f"kubectl {' '.join(map(str, arguments))}: exit status {code}\n{output}")
        return output

    @classmethod
    def try_kubectl(cls, *arguments, given=None):
        done = subprocess.run(["kubectl", *map(str, arguments)], env=cls.environment, input=given, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60)
        return done.returncode, done.stdout

    def create(self, *arguments, given=None):
        return self.try_kubectl("create", "-n", NAMESPACE, "--dry-run=server", *arguments, given=given)

    def check(self, *files):
        done = subprocess.run([binary(), "check", "--output", "json", *files], stdout=subprocess.PIPE, check=False,
                              timeout=60)
        return done.returncode, json.loads(done.stdout)

    def test_each_bad_policy_is_refused_by_all_three_with_the_same_message(self):
        files = sorted(GOLDEN.glob("*.yaml"))
        known = {path.stem for path in files}
        self.assertLessEqual(OWN_WORDS.keys() | NEVER_SENT.keys(), known, "a case is gone, its exception is not")
        same = 0
        for path in files:
            with self.subTest(path.stem):
                code, found = self.check(path)
                self.assertEqual(code, 2)
                errors = [(one["path"], one["message"]) for one in found if one["severity"] == "error"]
                self.assertTrue(errors)
                by_process = self.refused_by_process(path)
                self.assertTrue(by_process)
                if path.stem not in NO_KIND:
                    self.assertEqual(errors, by_process)
                if path.stem in NEVER_SENT:
                    continue
                code, said = self.create("-f", path)
                self.assertNotEqual(code, 0, said)
                if path.stem in OWN_WORDS:
                    continue
                for at, message in errors:
                    # "PATH: Invalid value: WHAT: MESSAGE", the value is missing for sections.
                    line = rf"{re.escape(at)}: (Required value|Invalid value)(: .*?)?: {re.escape(message)}(\n|$)"
                    self.assertRegex(said, line)
                same += 1
        self.assertGreaterEqual(same, 30)

    def refused_by_process(self, policy):
        """Starts the process with this policy; returns what it says of it."""
        config = self.folder / "sidestep.yaml"
        config.write_text(
            "apiVersion: sidestep.dev/v1alpha1\nkind: SidestepConfig\n"
            "listen: {extProc: '127.0.0.1:0', health: '127.0.0.1:0', admin: '127.0.0.1:0'}\n"
            "pods: {inline: [{name: d, address: '10.0.0.1:8000', role: decode}]}\n"
            f"policy: {{file: '{policy}'}}\n")
        done = subprocess.run([binary(), "serve", "--config", config], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, check=False, timeout=5)
        self.assertEqual(done.returncode, 2, done.stderr)
        lines = [line for line in done.stderr.splitlines() if str(policy) in line]
        return [(line.split(": ", 1)[0], self.message(line, policy)) for line in lines]

    def message(self, line, policy):
        said = line.split(": ", 1)[1].split(f" ({policy}", 1)[0]
        # A hint follows, which is no part of the message.
        return re.sub(r"; (is \S+ meant\?|write it without quotes|text that looks like a number is written in quotes)$",
                      "", said)

    def test_each_example_is_accepted_as_it_is(self):
        for path in sorted(EXAMPLES.glob("*.yaml")):
            with self.subTest(path.stem):
                self.kubectl("apply", "-n", NAMESPACE, "-f", path)
        table = self.kubectl("get", "dpol", "-n", NAMESPACE)
        self.assertEqual(table.splitlines()[0].split(),
                         ["NAME", "TYPE", "THRESHOLD", "RATIO", "ACCEPTED", "EFFECTIVE", "AGE"])
        self.assertRegex(table, r"chat +IslOrLoad +2048 +0\.7 ")
        self.assertEqual(self.kubectl("get", "sidestep", "-n", NAMESPACE, "-o", "name").split().count(
            "disaggregationpolicy.sidestep.dev/never"), 1)
        mode = self.kubectl("get", "dpol", "by-class", "-n", NAMESPACE, "-o", "jsonpath={.spec.sessionAffinity.mode}")
        self.assertEqual(mode, "None", "a word that YAML 1.1 readers leave alone")

    def test_what_the_server_makes_of_a_policy_is_a_policy_without_warnings(self):
        given = ("apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {name: least}\n"
                 "spec: {rules: [{bypass: {type: Always}}], scoring: {hostTier: null}, handoff: null}\n")
        self.kubectl("create", "-n", NAMESPACE, "-f", "-", given=given)
        stored = self.kubectl("get", "dpol", "least", "-n", NAMESPACE, "-o", "json")
        self.assertEqual(json.loads(stored)["spec"], {
            "rules": [{"bypass": {"type": "Always"}, "onNoPrefill": "Local"}],
            "scoring": {"overlapCredit": 1, "hostTier": 0.75, "diskTier": 0.25, "prefillLoadScale": 1,
                        "activeRequestWeight": 0, "temperature": 0},
            "sessionAffinity": {"mode": "None"}, "handoff": {"dialect": "decodeFirst"}, "clientPins": "Ignore"})
        file = self.folder / "stored.json"
        file.write_text(stored)
        self.assertEqual(self.check(file), (0, []))

    def test_a_change_is_held_to_the_same_rules_and_the_status_has_its_own_door(self):
        self.kubectl("apply", "-n", NAMESPACE, "-f", EXAMPLES / "never.yaml")
        code, said = self.try_kubectl("patch", "dpol", "never", "-n", NAMESPACE, "--type=merge", "-p",
                                      '{"spec": {"scoring": {"temperature": -1}}}')
        self.assertNotEqual(code, 0)
        self.assertIn("spec.scoring.temperature: Invalid value: -1: expected a number from 0 to 1000000, found -1", said)
        condition = {"type": "Accepted", "status": "False", "reason": "Conflicted", "message": "m",
                     "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
        observed = {"windowSeconds": 300, "decisions": 7, "byReason": {"policy_never": 7}}
        self.kubectl("patch", "dpol", "never", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p",
                     json.dumps({"status": {"conditions": [condition], "observed": observed}}))
        stored = json.loads(self.kubectl("get", "dpol", "never", "-n", NAMESPACE, "-o", "json"))
        self.assertEqual(stored["status"], {"conditions": [condition], "observed": observed})
        self.assertRegex(self.kubectl("get", "dpol", "never", "-n", NAMESPACE), r"never +Never +False +")


if __name__ == "__main__":
    unittest.main(verbosity=2)
