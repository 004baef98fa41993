"""The chart beside a real Envoy Gateway: install, requests, policy changes, upgrade, rollback, uninstall.

Lives here: one release's life, in order. Never here: values and schemas (`test_chart.py`).
Invariant: only what the chart renders connects the gateway and the picker.
"""

import json
import threading
import time
import unittest

import suite
from harness import CHART, GATEWAY_CLASS, MODEL, chat, get, static_pods, until

NAMESPACE, RELEASE = "serving", "sidestep"


def policy(kind, **more):
    return {"rules": [{"bypass": {"type": kind, **more}, "onNoPrefill": "Local"}]}


class Life(unittest.TestCase):
    """Methods run in the order of their names; each builds on what the one before left."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = suite.cluster()
        cls.cluster.namespace(NAMESPACE)
        cls.cluster.apply(GATEWAY_CLASS)
        cls.decode = cls.cluster.engines(NAMESPACE, "decode", 2)
        cls.prefill = cls.cluster.engines(NAMESPACE, "prefill", 1)
        cls.values = {
            "models": [{"name": MODEL, "tokenizer": {"builtin": True}}],
            "pods": {"source": "static", "static": static_pods(cls.decode, cls.prefill)},
            "policy": {"source": "configMap", "spec": policy("Never")},
            "gateway": {"mode": "envoyGateway", "gateway": {"create": True},
                        "engines": {"selector": {"app": "engine", "llm-d.ai/role": "decode"}}},
        }
        cls.cluster.install(RELEASE, NAMESPACE, cls.values)
        cls.base = "http://" + cls.cluster.gateway(NAMESPACE, RELEASE)
        until(lambda: chat(cls.base, "hello")[0] == 200, "an answer through the gateway")

    def test_1_requests_reach_the_pod_that_the_picker_chose(self):
        status, headers, body = chat(self.base, "one " * 50)
        self.assertEqual(status, 200, body)
        self.assertIn("x-sidestep-decision", headers)

if __name__ == "__main__":
    suite.main()
