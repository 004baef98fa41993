"""The chart beside a real Envoy Gateway: install, requests, policy changes, upgrade, rollback, uninstall.

Lives here: one release's life, in order. Never here: values and schemas (`test_chart.py`).
Invariant: only what the chart renders connects the gateway and the picker.
"""

import json
import pathlib
import subprocess
import tempfile
import time
import unittest

import suite
from harness import GATEWAY_CLASS, MODEL, chat, get, until
from streams import Steady, Stream

NAMESPACE, RELEASE = "serving", "sidestep"
STREAMS = 100
FORGED = ("x-gateway-destination-endpoint", "x-prefiller-host-port", "x-prefiller-url", "x-decoder-host-port")


def bypass(kind, **more):
    return {"rules": [{"bypass": {"type": kind, **more}, "onNoPrefill": "Local"}]}


class Life(unittest.TestCase):
    """Methods run in the order of their names; each builds on what the ones before left."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = suite.cluster()
        suite.definitions()
        cls.cluster.namespace(NAMESPACE)
        cls.cluster.apply(GATEWAY_CLASS)
        slow = ("--time-scale=10", "--answer-tokens=4096")
        cls.decode = cls.cluster.engines(NAMESPACE, "decode", 2, arguments=slow)
        cls.prefill = cls.cluster.engines(NAMESPACE, "prefill", 1)
        cls.values = {
            "models": [{"name": MODEL, "tokenizer": {"builtin": True}}],
            "pool": {"selector": {"app": "engine"}},
            # The tests apply their own, as an operator does who keeps policies apart from releases.
            "policy": {"create": False},
            "gateway": {"mode": "envoyGateway", "gateway": {"create": True}},
        }
        cls.cluster.install(RELEASE, NAMESPACE, cls.values)
        cls.apply_policy(bypass("Never"))
        cls.address = cls.cluster.gateway(NAMESPACE, RELEASE)
        cls.base = f"http://{cls.address}"
        until(lambda: chat(cls.base, "hello")[0] == 200, "an answer through the gateway")

    # ---- helpers -----------------------------------------------------------------------------------------------

    def ask(self, text="hello", **more):
        """Headers of a request that is answered."""
        status, headers, body = chat(self.base, text, **more)
        self.assertEqual(status, 200, body)
        return headers

    def pickers(self):
        pods = self.cluster.get("-n", NAMESPACE, "pods", "-l", "app.kubernetes.io/name=sidestep")["items"]
        return [pod["status"]["podIP"] for pod in pods
                if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("podIP")]

    def decision(self, headers):
        """The picker's own record of a request, which it shows to its own pod only."""
        name = headers["x-sidestep-decision"]
        for address in self.pickers():
            try:
                return json.loads(self.cluster.inside(address, f"http://127.0.0.1:9090/v1/decisions/{name}"))
            except AssertionError as error:
                last = error
        raise AssertionError(f"decision {name}: expected one picker to know it, found none: {last}")

    def arrived(self, addresses):
        """The headers of the requests that engines remember, with the engine's address."""
        found = []
        for _, address in addresses:
            for one in json.loads(get(f"http://{address}:8000/sim/requests")[2])["requests"]:
                found.append((address, dict(one["headers"])))
        return found

    def reason(self):
        """What was decided about a request that is sent now, as its decode pod was told."""
        name = self.ask("what is in force?")["x-sidestep-decision"]
        sent = next(sent for _, sent in self.arrived(self.decode) if sent.get("x-sidestep-decision") == name)
        return sent.get("x-sidestep-bypass") or ("policy_never" if "x-prefiller-host-port" in sent else "neither")

    def policies_in_force(self, word):
        """Whether every picker decides so; each is asked, since a request goes to one."""
        return word in self.reason() and all(word in self.reason() for _ in self.pickers())

    def upgrade(self, **values):
        self.cluster.install(RELEASE, NAMESPACE, {**self.values, **values})

    # ---- the life of a release ---------------------------------------------------------------------------------

    def test_1_requests_reach_the_pods_that_the_picker_chose(self):
        headers = self.ask("chosen " * 60)
        name = headers["x-sidestep-decision"]
        decoders = {ip for _, ip in self.decode}
        served = [(ip, sent) for ip, sent in self.arrived(self.decode) if sent.get("x-sidestep-decision") == name]
        self.assertEqual(len(served), 1, "expected one decode pod to have served the request")
        ip, sent = served[0]
        self.assertEqual(sent["x-gateway-destination-endpoint"], f"{ip}:8000")
        self.assertIn(ip, decoders)
        self.assertEqual(sent["x-prefiller-host-port"], f"{self.prefill[0][1]}:8000")
        self.assertIn("policy_never", json.dumps(self.decision(headers)))

    def test_1_what_a_client_writes_into_routing_headers_changes_nothing(self):
        prefill = f"{self.prefill[0][1]}:8000"
        names = {self.ask(f"forged {number}", headers={name: "127.0.0.1:9" if number % 2 else prefill for name in FORGED})
                 ["x-sidestep-decision"] for number in range(20)}
        served = [(ip, sent) for ip, sent in self.arrived(self.decode) if sent.get("x-sidestep-decision") in names]
        self.assertEqual(len(served), 20)
        for ip, sent in served:
            self.assertEqual(sent["x-gateway-destination-endpoint"], f"{ip}:8000")
            self.assertNotIn("x-prefiller-url", sent)
            self.assertNotIn("x-decoder-host-port", sent)

    def test_1_envoy_gateway_accepts_every_object(self):
        for kind in ("envoyextensionpolicy", "backendtrafficpolicy", "clienttrafficpolicy", "httproute"):
            for one in self.cluster.get("-n", NAMESPACE, kind)["items"]:
                status = one["status"]
                conditions = [condition for parent in status.get("ancestors", status.get("parents", []))
                              for condition in parent["conditions"]]
                accepted = [c["status"] for c in conditions if c["type"] in ("Accepted", "ResolvedRefs")]
                self.assertTrue(accepted and set(accepted) == {"True"}, f"{kind}: {json.dumps(conditions)}")

    def test_1_limits_are_those_of_the_chart_in_envoy_itself(self):
        dump = self.envoy("/config_dump?resource=dynamic_active_clusters")
        clusters = [one["cluster"] for one in json.loads(dump)["configs"]]
        ours = [one for one in clusters if "sidestep" in one["name"] and "circuit_breakers" in one]
        self.assertGreaterEqual(len(ours), 2, [one["name"] for one in clusters])
        for one in ours:
            for threshold in one["circuit_breakers"]["thresholds"]:
                self.assertGreaterEqual(threshold["max_requests"], 40000, one["name"])

    def test_2_helm_test_sends_a_request_through_the_gateway(self):
        said = self.cluster.helm("test", RELEASE, "--namespace", NAMESPACE, "--timeout", "60s")
        self.assertIn("Phase:          Succeeded", said)
        name = f"{RELEASE}-test"
        logs = "".join(log.read_text() for log in self.cluster.parts.folder.glob(f"pods/{NAMESPACE}_{name}_*/*/log"))
        self.assertIn("the picker's decision was", logs)

    def test_3_a_policy_takes_effect_within_two_seconds_of_kubectl_apply(self):
        for kind, word in (("Always", "policy_always"), ("Never", "policy_never")):
            self.apply_policy(bypass(kind))
            begun = time.monotonic()
            until(lambda: self.policies_in_force(word), f"the policy {kind}", 10)
            self.assertLess(time.monotonic() - begun, 2.0)

    def test_3_a_policy_with_a_fault_is_refused_in_our_words_and_changes_nothing(self):
        for rule, words in (({"type": "IslBounding", "effectiveIslRatioThreshold": 1.5}, "effectiveIslRatioThreshold"),
                            ({"type": "IslBounding", "effectiveIslTreshold": 10}, "effectiveIslTreshold"),
                            ({"type": "Sometimes"}, "IslOrLoad")):
            said = self.apply_policy({"rules": [{"bypass": rule}]}, fails=True)
            self.assertIn(words, said)
        self.assertIn("policy_never", self.reason())

    def test_4_an_upgrade_fails_no_request_with_100_streams_open(self):
        before = set(self.pickers())
        streams = [Stream(self.address, number, 500) for number in range(STREAMS)]
        for one in streams:
            one.start()
        for one in streams:
            self.assertTrue(one.begun.wait(60), "expected every stream to begin")
        steady = Steady(lambda: chat(self.base, "meanwhile", max_tokens=1))
        steady.start()
        open_at_start = sum(one.is_alive() for one in streams)
        self.upgrade(limits={"inFlight": 5000})
        until(lambda: not before & set(self.pickers()), "every old pod ending")
        open_at_end = sum(one.is_alive() for one in streams)
        steady.stop()
        for one in streams:
            one.join(120)
        self.assertEqual((open_at_start, open_at_end), (STREAMS, STREAMS), "open before, and when the old pods end")
        self.assertEqual([one.trouble for one in streams if one.trouble], [])
        self.assertEqual(steady.failed, [])
        self.assertGreater(steady.answered, 10)

    def test_5_rollback_goes_back_without_a_failed_request(self):
        steady = Steady(lambda: chat(self.base, "meanwhile", max_tokens=1))
        steady.start()
        self.cluster.helm("rollback", RELEASE, "1", "--namespace", NAMESPACE, "--wait", "--timeout", "90s")
        steady.stop()
        self.assertEqual(steady.failed, [])
        config = self.cluster.get("-n", NAMESPACE, "configmap", f"{RELEASE}-config")["data"]["sidestep.yaml"]
        self.assertIn("inFlight: 4096", config)

    def test_6_every_way_to_secure_the_port_works(self):
        self.secret("picker-tls")
        for tls in ({"mode": "plaintext"}, {"mode": "secret", "secretName": "picker-tls"}):
            with self.subTest(tls=tls["mode"]):
                self.upgrade(tls=tls)
                until(lambda: chat(self.base, "secured")[0] == 200, f"an answer with tls.mode {tls['mode']}")
                self.ask("secured")

    def test_7_a_policy_file_takes_effect_without_a_restart(self):
        file = {"source": "configMap", "spec": bypass("Never")}
        before = set(self.pickers())
        self.upgrade(policy=file)
        until(lambda: not before & set(self.pickers()), "the pods that read the file")
        pods = set(self.pickers())
        self.upgrade(policy={**file, "spec": bypass("Always")})
        until(lambda: self.policies_in_force("policy_always"), "the policy in the file", 90)
        self.assertEqual(set(self.pickers()), pods)

    def test_9_uninstall_leaves_nothing(self):
        self.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "90s")
        kinds = self.cluster.kubectl("api-resources", "--verbs=list,delete", "--namespaced", "-o", "name").split()
        kinds = ",".join(kind for kind in kinds if not kind.startswith("events"))

        def left():
            own = self.cluster.get("-A", kinds, "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
            named = [one for one in self.cluster.get("-n", NAMESPACE, kinds)["items"] if "sidestep" in
                     one["metadata"]["name"]]
            return [(one["kind"], one["metadata"]["name"]) for one in own + named]
        until(lambda: not left() or None, "nothing left")
        roles = self.cluster.get("clusterroles,clusterrolebindings", "-l", f"app.kubernetes.io/instance={RELEASE}")
        self.assertEqual(roles["items"], [])

    # ---- means -------------------------------------------------------------------------------------------------

    @classmethod
    def apply_policy(cls, spec, fails=False):
        target = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": RELEASE}
        one = {"apiVersion": "sidestep.dev/v1alpha1", "kind": "DisaggregationPolicy",
               "metadata": {"name": "chat", "namespace": NAMESPACE}, "spec": {"targetRef": target, **spec}}
        return cls.cluster.kubectl("apply", "-f", "-", given=json.dumps(one), fails=fails)

    def envoy(self, path):
        """Envoy's own admin interface, which listens in its pod only."""
        pods = self.cluster.get("-A", "pods", "-l", "gateway.envoyproxy.io/owning-gateway-name=" + RELEASE)["items"]
        address = pods[0]["status"]["podIP"]
        return self.cluster.inside(address, f"http://127.0.0.1:19000{path}")

    def secret(self, name):
        """A certificate for the picker and the authority that signed it, as a Secret."""
        host = f"{RELEASE}.{NAMESPACE}.svc.cluster.local"
        with tempfile.TemporaryDirectory() as folder:
            def openssl(*words):
                subprocess.run(["openssl", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
            key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
            openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test", "-days", "2")
            openssl("req", *key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", f"/CN={RELEASE}")
            pathlib.Path(folder, "names").write_text(f"subjectAltName=DNS:{host}")
            openssl("x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days",
                    "2", "-extfile", "names", "-out", "tls.crt")
            data = {file: pathlib.Path(folder, file).read_text() for file in ("tls.crt", "tls.key", "ca.crt")}
        self.cluster.apply({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "stringData": data,
                            "metadata": {"name": name, "namespace": NAMESPACE}})


if __name__ == "__main__":
    unittest.main()
