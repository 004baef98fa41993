#!/usr/bin/env python3
"""Policies against a real API server: applied, refused, chosen, written about.

Lives here: one test per behaviour of policies as objects. Never here: what a policy decides.
"""

import json
import pathlib
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from picker import Picker, Space, binary, eventually, kinds, kubectl, kubernetes_policy  # noqa: E402
from parts import Parts  # noqa: E402

GOOD = {"Accepted": ("True", "Accepted"), "ResolvedRefs": ("True", "ResolvedRefs"), "Effective": ("True", "Effective")}


class Policies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = binary()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-policies-")))
        cls.parts = cls.enterClassContext(Parts(cls.folder / "parts"))
        kinds(cls.parts)

    def setUp(self):
        name = "t-" + self.id().rsplit("test_", 1)[1].replace("_", "-")[:50].rstrip("-")
        self.space = Space(self.parts.cluster, self.program, name).create()
        self.kubeconfig = self.space.kubeconfig(self.folder)
        self.space.pool()
        self.space.pod("d", "10.0.0.1", "decode")
        self.space.pod("p", "10.0.0.2", "prefill")

    def picker(self, number=0, **more):
        folder = self.folder / f"{self.space.name}-{number}"
        return Picker(self.program, folder, kubernetes_policy(**more), self.kubeconfig)

    def in_force(self, picker, name, seconds=15.0):
        eventually(f"{name} is in force, log:\n{picker.log()[-3000:]}", lambda: picker.policy()[0] == name, seconds)

    def test_a_policy_takes_effect_within_two_seconds_and_says_so(self):
        with self.picker() as picker:
            self.in_force(picker, "default")
            eventually("ready", lambda: picker.ready()[0])
            self.space.policy(type="IslBounding", effectiveIslThreshold=100, effectiveIslRatioThreshold=0.5)
            self.in_force(picker, "policy", 2.0)
            before = picker.policy()[1]
            self.space.policy(type="Always")
            eventually("the change is in force", lambda: picker.policy()[1] != before, 2.0)
            eventually("the status says so", lambda: self.space.conditions() == GOOD)
            self.space.api.delete(self.space.policies("policy"))
            self.in_force(picker, "default", 2.0)

    def test_a_change_by_kubectl_apply_takes_effect_within_two_seconds(self):
        def manifest(kind):
            return json.dumps({"apiVersion": "sidestep.dev/v1alpha1", "kind": "DisaggregationPolicy",
                               "metadata": {"name": "policy", "namespace": self.space.name},
                               "spec": {"targetRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool",
                                                      "name": "pool"}, "rules": [{"bypass": {"type": kind}}]}})
        with self.picker() as picker:
            eventually("ready", lambda: picker.ready()[0])
            kubectl(self.parts, "apply", "-f", "-", given=manifest("Always"))
            self.in_force(picker, "policy", 2.0)
            before = picker.policy()[1]
            kubectl(self.parts, "apply", "-f", "-", given=manifest("Never"))
            eventually("the change is in force", lambda: picker.policy()[1] != before, 2.0)

    def test_a_policy_with_faults_changes_nothing_and_says_why(self):
        with self.picker() as picker:
            self.space.policy(type="Always")
            self.in_force(picker, "policy")
            before = picker.policy()
            # Past the API server's own check, as a policy of an older definition would be.
            self.unchecked(lambda: self.space.policy(type="Alway"))
            eventually("the fault is in the status", lambda: self.space.conditions().get("Accepted") == ("False", "Invalid"))
            status = self.space.api.get(self.space.policies("policy"))["status"]["conditions"]
            message = next(one["message"] for one in status if one["type"] == "Accepted")
            self.assertIn("spec.rules[0].bypass.type: expected Never, Always", message)
            self.assertEqual(picker.policy(), before)
            self.assertGreaterEqual(picker.metric("config_reload_failures_total"), 1)
            self.space.policy(type="Never")
            eventually("it is good again", lambda: self.space.conditions() == GOOD)

    def unchecked(self, change):
        """Runs `change` while the definition of policies checks nothing."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disaggregationpolicies.sidestep.dev"
        loose = [{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec",
                  "value": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}]
        def json_patch():
            return self.space.api.call("PATCH", path, loose, "application/json-patch+json")
        held = self.space.api.get(path)["spec"]
        json_patch()
        def taken():
            try:
                change()
                return True
            except Exception:  # noqa: BLE001 - the server has not taken the looser definition yet
                return False
        eventually("the server takes it", taken)
        self.addCleanup(lambda: self.space.api.patch(path, {"spec": held}))

    def test_of_two_policies_the_older_applies_and_the_other_says_so(self):
        self.space.policy("older", type="Always")
        time.sleep(1.1)  # creation times have seconds
        self.space.policy("newer", type="Never")
        with self.picker() as picker:
            self.in_force(picker, "older")
            eventually("the newer one is refused", lambda: self.space.conditions("newer").get("Accepted")
                       == ("False", "Conflicted"))
            self.space.policy("astray", pool="another", type="Never")
            self.space.policy("loose", pool=None, type="Never")
            eventually("no target, no effect", lambda: self.space.conditions("loose").get("Effective")
                       == ("False", "NoTarget"))
            self.assertEqual(self.space.conditions("astray"), {}, "another picker's business")
            self.space.api.delete(self.space.policies("older"))
            self.in_force(picker, "newer", 2.0)
            eventually("it is effective", lambda: self.space.conditions("newer") == GOOD)

    def test_one_replica_writes_and_another_takes_over_when_it_is_gone(self):
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{self.space.name}/leases/sidestep-pool"
        def holder():
            try:
                return self.space.api.get(lease)["spec"]["holderIdentity"]
            except Exception:  # noqa: BLE001 - not there yet
                return None
        with self.picker(1) as first:
            held = eventually("the lease is held", holder)
            with self.picker(2):
                self.space.policy(type="Always")
                eventually("it is written", lambda: self.space.conditions() == GOOD)
                self.assertEqual(holder(), held)
                first.process.kill()
                first.process.wait()
                eventually("it is taken over", lambda: holder() != held, 40)
                self.space.policy(type="Never")
                eventually("the new holder writes", lambda: self.space.api.get(self.space.policies("policy"))
                           ["status"]["conditions"][0].get("observedGeneration") == 2)


if __name__ == "__main__":
    unittest.main()
