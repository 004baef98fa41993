"""Data-parallel ranks through Envoy Gateway: pods with a port for each rank.

Lives here: that a request reaches the very rank that the picker chose, whatever ports the pool has.
Never here: the life of a release (`test_e2e.py`).
Invariant: every rank serves, and none serves what was meant for another.
"""

import json
import unittest

import suite
from harness import GATEWAY_CLASS, MODEL, RESTRICTED, chat, get, until

NAMESPACE, RELEASE = "ranks", "sidestep"
PORTS = [8000, 8001]


def engine(rank):
    ports = {"--listen": PORTS[rank], "--events": 5557 + rank, "--replay": 5657 + rank}
    return {"name": f"rank-{rank}", "image": "sidestep", "securityContext": RESTRICTED,
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "args": ["engine", "--role=both", f"--model={MODEL}", "--record-requests=256", "--time-scale=0",
                     *(f"{name}=$(POD_IP):{port}" for name, port in ports.items())],
            "readinessProbe": {"httpGet": {"path": "/health", "port": PORTS[rank]}, "periodSeconds": 1}}


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = suite.cluster()
        suite.definitions()
        cls.cluster.namespace(NAMESPACE)
        cls.cluster.apply(GATEWAY_CLASS, {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "engine", "namespace": NAMESPACE},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "engine"}}, "template": {
                "metadata": {"labels": {"app": "engine", "llm-d.ai/role": "both"}},
                "spec": {"containers": [engine(0), engine(1)]}}}})
        cls.cluster.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/engine", "--timeout=60s")
        pods = cls.cluster.get("-n", NAMESPACE, "pods", "-l", "app=engine")["items"]
        cls.ranks = [f"{pod['status']['podIP']}:{port}" for pod in pods for port in PORTS]
        cls.cluster.install(RELEASE, NAMESPACE, {
            "replicas": 1, "models": [{"name": MODEL, "tokenizer": {"builtin": True}}],
            "pool": {"selector": {"app": "engine"}, "targetPorts": PORTS},
            "pods": {"kubernetes": {"kvEvents": {"port": 5557, "replayPort": 5657}}},
            "gateway": {"mode": "envoyGateway", "gateway": {"create": True}}})
        cls.base = "http://" + cls.cluster.gateway(NAMESPACE, RELEASE)
        until(lambda: chat(cls.base, "hello")[0] == 200, "an answer through the gateway")

    @classmethod
    def tearDownClass(cls):
        cls.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "90s")

    def test_every_rank_serves_exactly_what_was_meant_for_it(self):
        sent = []
        for number in range(60):
            status, headers, body = chat(self.base, f"{number} is a text of its own, " * 20)
            self.assertEqual(status, 200, body)
            sent.append(headers["x-sidestep-decision"])
        served = {}
        for rank in self.ranks:
            for one in json.loads(get(f"http://{rank}/sim/requests")[2])["requests"]:
                headers = dict(one["headers"])
                if headers.get("x-sidestep-decision") in sent:
                    self.assertEqual(headers["x-gateway-destination-endpoint"], rank)
                    served.setdefault(rank, set()).add(headers["x-sidestep-decision"])
        self.assertEqual(sum(map(len, served.values())), len(set(sent)))
        self.assertEqual(sorted(served), sorted(self.ranks), "expected every rank to have served")


if __name__ == "__main__":
    unittest.main()
