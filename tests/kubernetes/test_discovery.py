#!/usr/bin/env python3
"""Discovery against a real API server: pools and pods change, and the picker follows.

Lives here: one test per behaviour; nothing is mocked but the kubelet, whose status updates the tests write.
Never here: what an object means in every case (the unit tests of `fleet::kubernetes`).
"""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from picker import Picker, Space, binary, eventually, kubernetes_pods  # noqa: E402
from parts import Parts  # noqa: E402

CRD = pathlib.Path(__file__).resolve().parent / "parts" / "inferencepool.crd.yaml"
READY, NOT_READY, LEAVING = "ready", "not_ready", "draining"


class Discovery(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = binary()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-discovery-")))
        cls.parts = cls.enterClassContext(Parts(cls.folder / "parts"))
        cls.kubectl("apply", "--server-side", "-f", CRD)
        cls.kubectl("wait", "crd/inferencepools.inference.networking.k8s.io", "--for=condition=Established")

    @classmethod
    def kubectl(cls, *arguments):
        import subprocess
        subprocess.run(["kubectl", *map(str, arguments)], env=cls.parts.environment(), check=True,
                       stdout=subprocess.DEVNULL)

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


if __name__ == "__main__":
    unittest.main()
