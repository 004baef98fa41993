#!/usr/bin/env python3
"""A watch that is cut, refused or late, against a real API server: nothing that it missed stays missed.

Lives here: what happens between picker and server. Never here: what objects mean (`test_discovery.py`).
Invariant: faults are made by a proxy; the server and what it says are real.
"""

import contextlib
import pathlib
import sys
import tempfile
import threading
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from between import Between  # noqa: E402
from picker import ROOT, Picker, Space, binary, eventually, kinds, kubernetes_pods  # noqa: E402
from parts import Parts  # noqa: E402

WATCH, LIST, NEXT_PAGE = ("/pods?", "watch="), ("/pods?", "limit="), ("/pods?", "continue=")
# Report 32: how long a deletion that was missed may stay unknown once the server answers again.
BOUND = 5.0


class Watch(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = binary()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-watch-")))
        cls.parts = cls.enterClassContext(Parts(cls.folder / "parts"))
        kinds(cls.parts, ROOT / "tests/kubernetes/parts/inferencepool.crd.yaml")

    def setUp(self):
        name = "t-" + self.id().rsplit("test_", 1)[1].replace("_", "-")[:50].rstrip("-")
        self.space = Space(self.parts.cluster, self.program, name).create()

    def between(self, page=None):
        return self.enterContext(Between(self.parts.cluster, page))

    def picker(self, between):
        kubeconfig = between.kubeconfig(self.space.kubeconfig(self.folder))
        picker = Picker(self.program, self.folder / self.space.name, kubernetes_pods(), kubeconfig)
        return self.enterContext(picker)

    def pods(self, *names, port=8000, **more):
        """Makes pods of these names; what the picker is to know of them."""
        known = {}
        for name in names:
            address = f"10.0.{ord(name[0]) - 96}.{len(name)}"
            self.space.pod(name, address, "decode", **more)
            known[name] = (f"{address}:{port}", "decode", "ready")
        return known

    def missed(self, afterwards=lambda between: None):
        """Deletes a pod while no connection to the server lasts; how long it stays known after the last fault."""
        between = self.between()
        self.space.pool()
        stays, goes = self.pods("stays"), self.pods("goes")
        picker = self.picker(between)
        picker.expect({**stays, **goes})
        between.down = True
        between.cut()
        self.space.remove("goes")
        eventually("it is seen that the server is away",
                   lambda: picker.metric("cluster_requests_failed_total", resource="pods", trouble="away"))
        self.assertEqual(picker.pods(), {**stays, **goes}, "what is known serves on")
        self.assertTrue(picker.ready()[0])
        afterwards(between)
        between.down = False
        back = time.monotonic()
        eventually("every fault has been met", lambda: not between.refuses(), 20)
        back = max(back, between.refused_at or 0)
        picker.expect(stays, BOUND - (time.monotonic() - back))
        return picker

    def test_a_deletion_while_the_connection_was_cut_is_known_in_time(self):
        picker = self.missed()
        self.assertEqual(picker.metric("watch_lists_total", resource="pods"), 1, "the watch is taken up where it was")

    def test_a_deletion_while_the_watch_became_too_old_is_known_in_time(self):
        def gone(between):
            between.refuse(WATCH, 410)
        picker = self.missed(gone)
        self.assertGreater(picker.metric("watch_lists_total", resource="pods"), 1)

    def test_a_deletion_is_known_in_time_although_the_list_is_refused_three_times(self):
        def gone_and_refused(between):
            between.refuse(WATCH, 410)
            between.refuse(LIST, 500, times=3)
        picker = self.missed(gone_and_refused)
        refused = picker.metric("cluster_requests_failed_total", resource="pods", verb="list", trouble="away")
        self.assertEqual(refused, 3)

    def test_deletions_are_known_in_time_while_the_watch_is_reset_again_and_again(self):
        between = self.between()
        self.space.pool()
        known = self.pods("a", "b", "c", "d")
        picker = self.picker(between)
        picker.expect(known)
        over = threading.Event()

        def resets():
            while not over.wait(1.5):
                between.cut()

        cutting = threading.Thread(target=resets, daemon=True)
        began = time.monotonic()
        cutting.start()
        try:
            for name in ("a", "b", "c"):
                self.space.remove(name)
                del known[name]
                picker.expect(known, BOUND)
            eventually("it has been cut more than once", lambda: 2 < (picker.metric(
                "cluster_requests_failed_total", resource="pods", verb="watch") or 0), 30)
        finally:
            over.set()
            cutting.join()
        failures = picker.metric("cluster_requests_failed_total", resource="pods", verb="watch")
        self.assertLessEqual(failures, 1 + time.monotonic() - began, "at most one attempt a second")

    def test_a_pool_that_changes_or_goes_between_two_pages_of_a_list_never_mixes(self):
        """Report 35."""
        between, space = self.between(page=2), self.space
        space.pool()
        old = self.pods("a", "b", "c")
        new = self.pods("x", "y", "z", port=8001, labels={"app": "other"})
        picker = self.picker(between)
        picker.expect(old)
        seen, over = set(), threading.Event()

        def look():
            while not over.is_set():
                known = picker.pods()
                if known is not None:
                    seen.add(frozenset((name, endpoint) for name, (endpoint, _, _) in known.items()))

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            with self.relist(between, picker) as lists:
                space.pool(labels={"app": "other"}, ports=(8001,))
                # The second page of the new selector is held as well.
                eventually("the new selector is listed", lambda: lists < picker.metric(
                    "watch_lists_total", resource="pods"))
                self.assertEqual(picker.pods(), old)
            picker.expect(new)
            with self.relist(between, picker):
                space.api.delete(space.pools("pool"))
                picker.expect({})
                self.assertFalse(picker.ready()[0])
            # What was listed for the pool that is gone comes to nothing.
            self.assertEqual(picker.pods(), {})
            space.pool()
            picker.expect(old)
        finally:
            over.set()
            looking.join()
        sets = {frozenset((name, endpoint) for name, (endpoint, _, _) in known.items()) for known in (old, new, {})}
        self.assertEqual(seen, sets, "each set is whole")

    @contextlib.contextmanager
    def relist(self, between, picker):
        """Makes the picker list its pods anew; inside, it has the first page and not the second. How often it listed."""
        lists = picker.metric("watch_lists_total", resource="pods")
        with between.held(NEXT_PAGE) as arrived:
            between.refuse(WATCH, 410)
            between.cut(WATCH)
            self.assertTrue(arrived.wait(20), "the second page is asked for")
            self.assertEqual(picker.metric("watch_lists_total", resource="pods"), lists + 1)
            yield lists + 1


if __name__ == "__main__":
    unittest.main()
