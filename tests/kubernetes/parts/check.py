#!/usr/bin/env python3
"""Proves the parts themselves: run it as `./parts.py isolated -- ./check.py`. Bounded; ends by itself.

A Gateway and an HTTPRoute reach the real Envoy over xDS, and a request through it arrives at the pod behind the Service.
Also: RBAC refuses, Pod Security refuses, a namespace goes away, and `helm --wait` waits for real probes.
"""

import json
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

sys.dont_write_bytecode = True

from parts import Parts  # noqa: E402

ECHO = ("import http.server,os,sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        " def do_GET(s):\n"
        "  b=os.environ['HOSTNAME'].encode();s.send_response(200);s.send_header('content-length',str(len(b)))\n"
        "  s.end_headers();s.wfile.write(b)\n"
        "http.server.ThreadingHTTPServer(('',8000),H).serve_forever()\n")
RESTRICTED = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
              "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}
CLASS = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "GatewayClass", "metadata": {"name": "eg"},
         "spec": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"}}
GATEWAY = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
           "metadata": {"name": "g", "namespace": "app"},
           "spec": {"gatewayClassName": "eg", "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]}}
ROUTE = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
         "metadata": {"name": "r", "namespace": "app"},
         "spec": {"parentRefs": [{"name": "g"}], "rules": [{"backendRefs": [{"name": "echo", "port": 80}]}]}}
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {
    "name": "app", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "echo", "namespace": "app"},
              "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "echo"}}, "template": {
                  "metadata": {"labels": {"app": "echo"}}, "spec": {"containers": [{
                      "name": "echo", "image": "parts/echo", "securityContext": RESTRICTED,
                      "ports": [{"containerPort": 8000}],
                      "readinessProbe": {"tcpSocket": {"port": 8000}}}]}}}}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "echo", "namespace": "app"},
           "spec": {"selector": {"app": "echo"}, "ports": [{"port": 80, "targetPort": 8000}]}}


class Check(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="sidestep-parts-check-")
        cls.addClassCleanup(cls.folder.cleanup)
        images = {"parts/echo": {"entrypoint": ["python3", "-c", ECHO]}}
        cls.parts = cls.enterClassContext(Parts(cls.folder.name, with_gateway=True, images=images))
        print(json.dumps({key: cls.parts.describe()[key] for key in ("seconds", "resident_kib")}), file=sys.stderr)
        for one in (NAMESPACE, DEPLOYMENT, SERVICE, CLASS, GATEWAY, ROUTE):
            cls.apply(one)

    @classmethod
    def apply(cls, one):
        cls.kubectl("apply", "--server-side", "-f", "-", given=json.dumps(one))

    @classmethod
    def kubectl(cls, *arguments, given=None, expect=0):
        done = subprocess.run(["kubectl", *arguments], input=given, env=cls.parts.environment(), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if (done.returncode == 0) != (expect == 0):
            raise AssertionError(f"kubectl {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    def test_a_request_through_the_gateway_reaches_every_pod(self):
        self.kubectl("-n", "app", "rollout", "status", "deployment/echo", "--timeout=60s")
        self.kubectl("-n", "app", "wait", "gateway/g", "--for=condition=Programmed", "--timeout=60s")
        address = self.kubectl("-n", "app", "get", "gateway", "g", "-o", "jsonpath={.status.addresses[0].value}")
        pods = set(self.kubectl("-n", "app", "get", "pods", "-o", "jsonpath={.items[*].metadata.name}").split())
        seen, deadline = set(), time.monotonic() + 60
        while seen != pods and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
                    seen.add(answer.read().decode())
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.assertEqual(seen, pods)

    def test_pod_security_refuses_a_pod_that_may_be_root(self):
        said = self.kubectl("-n", "app", "run", "bad", "--image=x", expect=1)
        self.assertIn('violates PodSecurity "restricted:latest"', said)

    def test_an_account_without_a_role_may_not_list_pods(self):
        said = self.kubectl("-n", "app", "get", "pods", "--as=system:serviceaccount:app:default", expect=1)
        self.assertIn("cannot list resource", said)

    def test_a_namespace_goes_away_with_what_it_holds(self):
        self.kubectl("create", "namespace", "gone")
        self.kubectl("-n", "gone", "run", "p", "--image=pretended")
        self.kubectl("-n", "gone", "wait", "pod/p", "--for=condition=Ready", "--timeout=30s")
        self.kubectl("delete", "namespace", "gone", "--timeout=60s")


if __name__ == "__main__":
    unittest.main()
