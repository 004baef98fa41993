#!/usr/bin/env python3
"""The picker with exactly the rights it names, and with each of them taken away.

Lives here: for every verb the check that it breaks, and only that. Never here: how a right is used.
Invariant: a right in the table without a check here fails the last test.
"""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from picker import Picker, Space, binary, eventually, kinds, kubernetes_policy  # noqa: E402
from parts import Parts  # noqa: E402

GOOD = {"Accepted": ("True", "Accepted"), "ResolvedRefs": ("True", "ResolvedRefs"), "Effective": ("True", "Effective")}
SEEN = set()


class Rights(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = binary()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-rights-")))
        cls.parts = cls.enterClassContext(Parts(cls.folder / "parts"))
        kinds(cls.parts)
        cls.count = 0

    def space(self):
        Rights.count += 1
        space = Space(self.parts.cluster, self.program, f"rights-{Rights.count}").create()
        space.pool()
        space.pod("d", "10.0.0.1", "decode")
        space.pod("p", "10.0.0.2", "prefill")
        space.policy(type="Always")
        return space

    def picker(self, space):
        return Picker(self.program, self.folder / space.name, kubernetes_policy(), space.kubeconfig(self.folder))

    def without(self, resource, verb):
        """A namespace whose role lacks one verb."""
        space = self.space()
        rules = [{**rule, "verbs": [one for one in rule["verbs"] if (rule["resources"], one) != ([resource], verb)]}
                 for rule in space.role["rules"]]
        self.assertEqual(sum(len(rule["verbs"]) for rule in rules),
                         sum(len(rule["verbs"]) for rule in space.role["rules"]) - 1, "the right is in the table")
        SEEN.add((resource, verb))
        space.grant([rule for rule in rules if rule["verbs"]])
        return space

    def works(self, picker, space, but=()):
        """Pods are known and followed, the policy is in force and its changes too, and its status is written."""
        decode, added = ("10.0.0.1:8000", "decode", "ready"), ("10.0.0.3:8000", "decode", "ready")
        if "pods" not in but:
            eventually("ready, log:\n" + picker.log()[-3000:], lambda: picker.ready()[0])
            space.pod("e", "10.0.0.3", "decode")
            picker.expect({"d": decode, "e": added, "p": ("10.0.0.2:8000", "prefill", "ready")}, 5)
        if "policy" not in but:
            eventually("the policy is in force", lambda: picker.policy()[0] == "policy")
            space.policy(type="Never")
            eventually("the change is in force", lambda: "ever" in str(picker.policy()[1]), 5)
        if "status" not in but:
            eventually("the status is written", lambda: space.conditions() == GOOD)

    def named(self, picker, resource, verb):
        """The missing right is named in the log and counted."""
        eventually("the failure is counted", lambda: picker.metric(
            "cluster_requests_failed_total", resource=resource, verb=verb, trouble="forbidden"))
        self.assertIn(f"{verb} {resource}: expected the right to do so, found none (403 Forbidden)", picker.log())

    def tried_again(self, picker, resource, verb):
        """Waits until the missing right has been missed twice more."""
        def count():
            return picker.metric("cluster_requests_failed_total", resource=resource, verb=verb, trouble="forbidden")
        before = count()
        eventually("it is tried again", lambda: before + 2 <= count())

    def test_all_works_with_exactly_the_rights_named_and_nothing_is_refused(self):
        space = self.space()
        with self.picker(space) as picker:
            self.works(picker, space)
            self.assertNotIn("403 Forbidden", picker.log())

    def test_without_listing_pods_it_is_never_ready_names_the_right_and_is_ready_once_it_has_it(self):
        space = self.without("pods", "list")
        with self.picker(space) as picker:
            self.named(picker, "pods", "list")
            ready, text = picker.ready()
            self.assertFalse(ready)
            self.assertIn("list pods: expected the right to do so", text)
            space.grant(space.role["rules"])
            eventually("ready", lambda: picker.ready()[0])

    def test_without_watching_pods_no_change_is_seen(self):
        space = self.without("pods", "watch")
        with self.picker(space) as picker:
            self.named(picker, "pods", "watch")
            before = eventually("the list is known", picker.pods)
            space.pod("late", "10.0.0.9", "decode")
            self.tried_again(picker, "pods", "watch")
            self.assertEqual(picker.pods(), before)

    def test_without_listing_pools_it_is_never_ready_and_names_the_right(self):
        space = self.without("inferencepools", "list")
        with self.picker(space) as picker:
            self.named(picker, "inferencepools", "list")
            self.assertIn("list inferencepools: expected the right to do so", picker.ready()[1])
            self.assertEqual(picker.pods(), {})

    def test_without_watching_pools_no_change_is_seen(self):
        space = self.without("inferencepools", "watch")
        with self.picker(space) as picker:
            self.named(picker, "inferencepools", "watch")
            eventually("ready", lambda: picker.ready()[0])
            space.pool(ports=(8001,))
            self.tried_again(picker, "inferencepools", "watch")
            space.pod("late", "10.0.0.9", "decode")
            eventually("the pod comes, with the old port", lambda: picker.pods().get("late"))
            self.assertEqual(picker.pods()["late"][0], "10.0.0.9:8000")

    def test_without_listing_policies_the_default_stays_in_force_and_it_serves(self):
        space = self.without("disaggregationpolicies", "list")
        with self.picker(space) as picker:
            self.named(picker, "disaggregationpolicies", "list")
            self.works(picker, space, but=("policy", "status"))
            self.assertEqual(picker.policy()[0], "default")
            warned = [line for line in picker.log().splitlines() if "list disaggregationpolicies" in line]
            self.assertEqual(len(warned), 1, "once a minute at most")

    def test_without_watching_policies_no_change_is_seen(self):
        space = self.without("disaggregationpolicies", "watch")
        with self.picker(space) as picker:
            self.named(picker, "disaggregationpolicies", "watch")
            eventually("the list is known", lambda: picker.policy()[0] == "policy")
            space.policy("other", type="Never")
            space.api.delete(space.policies("policy"))
            self.works(picker, space, but=("policy", "status"))
            self.tried_again(picker, "disaggregationpolicies", "watch")
            self.assertEqual(picker.policy()[0], "policy")

    def test_without_patching_the_status_none_is_written_and_it_serves(self):
        space = self.without("disaggregationpolicies/status", "patch")
        with self.picker(space) as picker:
            self.works(picker, space, but=("status",))
            self.named(picker, "disaggregationpolicies/status", "patch")
            self.assertEqual(space.conditions(), {})

    def test_without_the_lease_no_status_is_written_and_it_serves(self):
        for verb in ("create", "get"):
            with self.subTest(verb):
                space = self.without("leases", verb)
                with self.picker(space) as picker:
                    self.works(picker, space, but=("status",))
                    self.named(picker, "leases", verb)
                    self.assertEqual(space.conditions(), {})

    def test_without_updating_the_lease_it_runs_out(self):
        space = self.without("leases", "update")
        with self.picker(space) as picker:
            self.works(picker, space)
            self.named(picker, "leases", "update")
            eventually("the lease has run out", lambda: "held=false" in picker.log(), 30)

    def test_zz_every_right_of_the_table_has_a_check(self):
        role = Space(self.parts.cluster, self.program, "unused").role
        table = {(rule["resources"][0], verb) for rule in role["rules"] for verb in rule["verbs"]}
        self.assertEqual(SEEN, table)


if __name__ == "__main__":
    unittest.main()
