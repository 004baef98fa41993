#!/usr/bin/env python3
"""Discovery against a real API server: pools and pods change, and the picker follows.

Lives here: one test per behaviour; nothing is mocked but the kubelet, whose status updates the tests write.
Never here: what an object means in every case (the unit tests of `fleet::kubernetes`).
"""

import os
import pathlib
import signal
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from picker import ROOT, Picker, Space, binary, eventually, kinds, kubernetes_pods, kubernetes_policy  # noqa: E402
from parts import Parts  # noqa: E402

READY, NOT_READY, LEAVING = "ready", "not_ready", "draining"


class Discovery(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = binary()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-discovery-")))
        cls.parts = cls.enterClassContext(Parts(cls.folder / "parts"))
        kinds(cls.parts, ROOT / "tests/kubernetes/parts/inferencepool.crd.yaml")

    def setUp(self):
        name = "t-" + self.id().rsplit("test_", 1)[1].replace("_", "-")[:50].rstrip("-")
        self.space = Space(self.parts.cluster, self.program, name).create()
        self.kubeconfig = self.space.kubeconfig(self.folder)

    def picker(self, **more):
        return Picker(self.program, self.folder / self.space.name, kubernetes_pods(**more), self.kubeconfig)

    def test_pods_appear_change_role_leave_and_go(self):
        space = self.space
        space.pool()
        space.pod("d", "10.0.0.1", "decode")
        space.pod("p", "10.0.0.2", "prefill")
        with self.picker() as picker:
            decode, prefill = ("10.0.0.1:8000", "decode", READY), ("10.0.0.2:8000", "prefill", READY)
            picker.expect({"d": decode, "p": prefill})
            self.assertTrue(picker.ready()[0])
            space.pod("six", "fd00::6", "prefill-decode")
            picker.expect({"d": decode, "p": prefill, "six": ("[fd00::6]:8000", "both", READY)})
            space.relabel("p", {"llm-d.ai/role": "decode"})
            picker.expect({"d": decode, "p": ("10.0.0.2:8000", "decode", READY),
                           "six": ("[fd00::6]:8000", "both", READY)})
            self.assertNotIn("pod removed", picker.log(), "a role is changed, no pod is replaced")
            space.api.delete(space.path("pods/d"))
            space.remove("six")
            picker.expect({"d": ("10.0.0.1:8000", "decode", LEAVING), "p": ("10.0.0.2:8000", "decode", READY)})
            space.remove("d")
            picker.expect({"p": ("10.0.0.2:8000", "decode", READY)})

    def test_a_pod_that_is_not_ready_terminating_or_evicted_takes_no_requests(self):
        space = self.space
        space.pool()
        space.pod("stays", "10.0.0.1", "decode")
        space.pod("other", "10.0.0.2", "decode")
        with self.picker() as picker:
            stays = ("10.0.0.1:8000", "decode", READY)
            picker.expect({"stays": stays, "other": ("10.0.0.2:8000", "decode", READY)})
            space.status("other", "10.0.0.2", ready=False)
            picker.expect({"stays": stays, "other": ("10.0.0.2:8000", "decode", NOT_READY)})
            space.status("other", "10.0.0.2")
            picker.expect({"stays": stays, "other": ("10.0.0.2:8000", "decode", READY)})
            # The kubelet reports an eviction as an update without an address; no deletion follows.
            space.status("other", None, ready=False, phase="Failed")
            picker.expect({"stays": stays}, seconds=1.0)
            # Still Ready in its conditions, and asked to go.
            space.api.delete(space.path("pods/stays"))
            picker.expect({"stays": ("10.0.0.1:8000", "decode", LEAVING)}, seconds=1.0)
            eventually("no pod is left to be ready", lambda: not picker.ready()[0])

    def test_a_pod_whose_role_is_none_of_ours_is_in_no_role_and_named(self):
        space = self.space
        space.pool()
        space.pod("p", "10.0.0.1", "encode")
        space.pod("plain", "10.0.0.2")
        with self.picker() as picker:
            picker.expect({"plain": ("10.0.0.2:8000", "decode", READY)})
            said = [line for line in picker.log().splitlines() if "pod p: label llm-d.ai/role" in line]
            self.assertEqual(len(said), 1)
            self.assertIn('found "encode"', said[0])

    def test_every_port_of_a_pool_is_an_endpoint(self):
        space = self.space
        space.pool(ports=(8000, 8002))
        space.pod("d", "10.0.0.1", "decode")
        with self.picker() as picker:
            rank0 = ("10.0.0.1:8000", "decode", READY)
            picker.expect({"d": rank0, "d/1": ("10.0.0.1:8002", "decode", READY)})
            space.pool(ports=(8000, 8001, 8002))
            picker.expect({"d": rank0, "d/1": ("10.0.0.1:8001", "decode", READY),
                           "d/2": ("10.0.0.1:8002", "decode", READY)})
            space.pool(ports=(8000,))
            picker.expect({"d": rank0})

    def test_a_pool_is_changed_deleted_and_made_anew(self):
        space = self.space
        space.pool()
        space.pod("old", "10.0.0.1", "decode")
        space.pod("new", "10.0.0.2", "decode", labels={"app": "other"})
        with self.picker() as picker:
            picker.expect({"old": ("10.0.0.1:8000", "decode", READY)})
            space.pool(labels={"app": "other"}, ports=(8001,))
            picker.expect({"new": ("10.0.0.2:8001", "decode", READY)})
            space.api.delete(space.pools("pool"))
            picker.expect({})
            ready, text = picker.ready()
            self.assertFalse(ready)
            self.assertIn("InferencePool pool: expected to be there, found nothing", text)
            space.pool()
            picker.expect({"old": ("10.0.0.1:8000", "decode", READY)})
            self.assertTrue(picker.ready()[0])

    def test_a_pool_that_selects_everything_is_refused_and_the_last_one_stays(self):
        space = self.space
        space.pool()
        space.pod("d", "10.0.0.1", "decode")
        with self.picker() as picker:
            picker.expect({"d": ("10.0.0.1:8000", "decode", READY)})
            space.api.patch(space.pools("pool"), {"spec": {"selector": {"matchLabels": {"app": None}}}})
            eventually("the fault is named", lambda: "matchLabels: expected at least one label" in picker.log())
            space.pod("e", "10.0.0.2", "decode")
            picker.expect({"d": ("10.0.0.1:8000", "decode", READY), "e": ("10.0.0.2:8000", "decode", READY)})

    def test_what_is_known_serves_while_the_api_server_is_away_and_a_lost_deletion_is_made_up_for(self):
        space, cluster = self.space, self.parts.cluster
        space.pool()
        space.pod("stays", "10.0.0.1", "decode")
        space.pod("goes", "10.0.0.2", "decode")
        stays, goes = ("10.0.0.1:8000", "decode", READY), ("10.0.0.2:8000", "decode", READY)
        with self.picker() as picker:
            picker.expect({"stays": stays, "goes": goes})
            before = picker.metric("watch_lists_total", resource="pods")
            api = next(child for child in cluster.children if child.name == "kube-apiserver")
            api.process.send_signal(signal.SIGKILL)
            eventually("it is seen that the server is away",
                       lambda: picker.metric("cluster_requests_failed_total", resource="pods", trouble="away"))
            eventually("staleness rises", lambda: picker.metric("watch_stale_seconds", resource="pods") > 4, 10)
            self.assertEqual(picker.pods(), {"stays": stays, "goes": goes})
            self.assertTrue(picker.ready()[0])
            failures = picker.metric("cluster_requests_failed_total", resource="pods", trouble="away")
            self.assertLessEqual(failures, 6, "at most one attempt a second")
            # Deleted in the store behind everybody's back while no server runs; then all history is compacted.
            cluster.forget(f"/registry/pods/{space.name}/goes")
            cluster.restart_apiserver()
            back = time.monotonic()
            picker.expect({"stays": stays}, seconds=5.0)
            print(f"known {time.monotonic() - back:.1f} s after the server was back", file=sys.stderr)
            self.assertGreater(picker.metric("watch_lists_total", resource="pods"), before, "a 410 leads to a new list")
            eventually("staleness falls", lambda: picker.metric("watch_stale_seconds", resource="pods") < 4)
            space.pod("new", "10.0.0.3", "decode")
            picker.expect({"stays": stays, "new": ("10.0.0.3:8000", "decode", READY)})

    def test_without_the_kind_of_policies_it_serves_and_obeys_them_once_it_is_there(self):
        space = self.space
        space.pool()
        space.pod("d", "10.0.0.1", "decode")
        folder = self.folder / space.name
        with Picker(self.program, folder, kubernetes_policy(), self.kubeconfig) as picker:
            eventually("ready", lambda: picker.ready()[0])
            eventually("it is asked for again", lambda: 2 <= (picker.metric(
                "cluster_requests_failed_total", resource="disaggregationpolicies", trouble="not_found") or 0))
            said = [line for line in picker.log().splitlines() if "list disaggregationpolicies" in line]
            self.assertEqual(len(said), 1, "once a minute at most")
            self.assertEqual(picker.policy()[0], "default")
            kinds(self.parts, ROOT / "manifests" / "crds")
            space.policy(type="Always")
            eventually("the policy is in force", lambda: picker.policy()[0] == "policy")

    def test_a_server_that_hangs_is_found_out_and_taken_up_again(self):
        space, cluster = self.space, self.parts.cluster
        space.pool()
        space.pod("d", "10.0.0.1", "decode")
        with self.picker() as picker:
            picker.expect({"d": ("10.0.0.1:8000", "decode", READY)})
            api = next(child for child in cluster.children if child.name == "kube-apiserver")
            os.kill(api.pid, signal.SIGSTOP)
            try:
                eventually("the silence is noticed", lambda: picker.metric(
                    "cluster_requests_failed_total", resource="pods", trouble="away"), 180)
                self.assertTrue(picker.ready()[0])
            finally:
                os.kill(api.pid, signal.SIGCONT)
            space.pod("e", "10.0.0.2", "decode")
            picker.expect({"d": ("10.0.0.1:8000", "decode", READY), "e": ("10.0.0.2:8000", "decode", READY)}, 20)


if __name__ == "__main__":
    unittest.main()
