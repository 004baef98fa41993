#!/usr/bin/env python3
"""Pods that leave while requests run on them: the requests end as they should, and no other one is sent there.

Lives here: a real API server, a real Envoy, pods of this process. Never here: how an object is read (the unit tests).
Invariant: what a pod answers comes from that pod's own address, so that a wrong one would be seen.
"""

import http.client
import http.server
import json
import pathlib
import socket
import sys
import tempfile
import threading
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from fetch import fetch  # noqa: E402
from picker import ROOT, Picker, Space, binary, eventually, kinds, kubernetes_pods  # noqa: E402
from parts import Parts  # noqa: E402
from processes import Child, free_port  # noqa: E402

ADDRESSES = {"first": "127.0.0.11", "second": "127.0.0.12"}
# Report 33: requests that must all go elsewhere.
REQUESTS = 200


class Leaving(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = binary()
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="sidestep-leaving-")))
        cls.parts = cls.enterClassContext(Parts(cls.folder / "parts"))
        kinds(cls.parts, ROOT / "tests/kubernetes/parts/inferencepool.crd.yaml")
        cls.envoy = fetch(("envoy",))["envoy"]

    def setUp(self):
        name = "t-" + self.id().rsplit("test_", 1)[1].replace("_", "-")[:50].rstrip("-")
        self.space = Space(self.parts.cluster, self.program, name).create()
        self.port = _free_on_all(ADDRESSES.values())
        self.engines = {name: self.enterContext(Engine(name, address, self.port))
                        for name, address in ADDRESSES.items()}
        self.space.pool(ports=(self.port,))
        for name, address in ADDRESSES.items():
            self.space.pod(name, address, "decode")
        # The shipped Envoy configuration expects the picker's default: TLS, self-signed.
        config = {**kubernetes_pods(), "tls": {"mode": "SelfSigned"}}
        kubeconfig = self.space.kubeconfig(self.folder)
        self.picker = self.enterContext(Picker(self.program, self.folder / self.space.name, config, kubeconfig))
        self.picker.expect(self.known("first", "second"))
        self.gateway = self.start_envoy()

    def known(self, *names, availability="ready"):
        return {name: (f"{ADDRESSES[name]}:{self.port}", "decode", availability) for name in names}

    def start_envoy(self):
        text = (ROOT / "manifests/envoy/full-duplex.yaml").read_text()
        gateway, admin = free_port(), free_port()
        for old, new in (('"0.0.0.0", port_value: 10000', f'"127.0.0.1", port_value: {gateway}'),
                         ("port_value: 9901", f"port_value: {admin}"),
                         ("port_value: 9002", f"port_value: {self.picker.ext_proc}"),
                         ('"10.0.0.11", port_value: 8000', f'"{ADDRESSES["first"]}", port_value: {self.port}'),
                         ('"10.0.0.12", port_value: 8000', f'"{ADDRESSES["second"]}", port_value: {self.port}')):
            self.assertEqual(text.count(old), 1, old)
            text = text.replace(old, new)
        config = self.folder / self.space.name / "envoy.yaml"
        config.write_text(text)
        child = Child("envoy", [self.envoy, "-c", config, "--disable-hot-restart", "--concurrency", "1",
                                "--log-level", "warning"], config.parent)
        self.addCleanup(child.stop)
        child.wait_until(lambda: socket.create_connection(("127.0.0.1", gateway), 1).close() is None, 30)
        return gateway

    def ask(self, text):
        """The answer's status, its pod, and what is still to be read of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway, timeout=30)
        self.addCleanup(connection.close)
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers.get("x-pod"), answer

    def stream(self):
        """A stream that has begun: its pod, the other one, and the stream."""
        status, busy, answer = self.ask(HELD)
        self.assertEqual(status, 200)
        self.assertIn(b"begins", answer.readline())
        (other,) = set(ADDRESSES) - {busy}
        self.assertEqual(self.booked(busy), 1)
        return busy, other, answer

    def booked(self, name):
        _, text = self.picker.get("/v1/pods")
        return next((pod["requests"] for pod in json.loads(text) if pod["name"] == name), None)

    def assert_all_go_to(self, other):
        reached = set()
        for number in range(REQUESTS):
            status, pod, answer = self.ask(f"request {number}")
            self.assertEqual(status, 200)
            self.assertIn(b"[DONE]", answer.read())
            reached.add(pod)
        self.assertEqual(reached, {other})

    def assert_ends_well(self, busy, answer):
        """The held stream goes on to its end, and its load is released once, as a request that was completed."""
        self.assertEqual(self.picker.metric("requests_in_flight"), 1)
        self.engines[busy].go_on.set()
        self.assertIn(b"[DONE]", answer.read())
        eventually("its load is released", lambda: self.picker.metric("requests_in_flight") == 0)
        self.assertIn(self.booked(busy), (0, None))
        self.assertEqual(self.picker.metric("streams_aborted_total"), 0)
        _, text = self.picker.get("/v1/decisions?limit=1000")
        ends = [decision["end"] for decision in json.loads(text)]
        self.assertEqual(ends, ["completed"] * (REQUESTS + 1))

    def test_a_terminating_pod_finishes_its_stream_and_gets_no_request(self):
        """Report 33. Its conditions say Ready until the end."""
        busy, other, answer = self.stream()
        self.space.api.delete(self.space.path(f"pods/{busy}"))
        self.picker.expect({**self.known(other), **self.known(busy, availability="draining")}, seconds=1.0)
        self.assert_all_go_to(other)
        self.assertEqual(self.booked(busy), 1, "the stream is not touched")
        self.assert_ends_well(busy, answer)
        # The only one left goes too: a refusal, and no hang.
        self.space.api.delete(self.space.path(f"pods/{other}"))
        self.picker.expect(self.known(busy, other, availability="draining"), seconds=1.0)
        asked = time.monotonic()
        status, _, answer = self.ask("nobody is left")
        self.assertEqual(status, 503)
        self.assertEqual(json.loads(answer.read())["error"]["code"], "no_decode_pod")
        self.assertLess(time.monotonic() - asked, 5)

    def test_an_evicted_pod_finishes_its_stream_and_gets_no_request(self):
        """Report 31: an update without an address, and no deletion."""
        busy, other, answer = self.stream()
        self.space.status(busy, None, ready=False, phase="Failed")
        self.picker.expect(self.known(other), seconds=1.0)
        self.assert_all_go_to(other)
        self.assert_ends_well(busy, answer)
        _, metrics = self.picker.get("/metrics")
        self.assertIn(f'engine="{other}"', metrics)
        self.assertNotIn(f'engine="{busy}"', metrics)

    def test_a_pod_that_is_gone_at_once_releases_its_stream_once_and_its_address_comes_back_empty(self):
        busy, other, answer = self.stream()
        self.space.remove(busy)
        self.picker.expect(self.known(other), seconds=1.0)
        self.assert_all_go_to(other)
        self.space.pod(f"{busy}-again", ADDRESSES[busy], "decode")
        endpoint = (f"{ADDRESSES[busy]}:{self.port}", "decode", "ready")
        self.picker.expect({**self.known(other), f"{busy}-again": endpoint})
        self.assertEqual(self.booked(f"{busy}-again"), 0, "load of the one before is not its own")
        self.assert_ends_well(busy, answer)
        self.assertEqual(self.booked(f"{busy}-again"), 0)

    def test_without_its_pool_every_request_is_refused_and_a_stream_goes_on(self):
        """Report 35, as the client sees it."""
        busy, _, answer = self.stream()
        self.space.api.delete(self.space.pools("pool"))
        self.picker.expect({})
        for _ in range(20):
            status, _, refused = self.ask("no pool")
            self.assertEqual(status, 503, refused.read())
        self.engines[busy].go_on.set()
        self.assertIn(b"[DONE]", answer.read())
        eventually("its load is released", lambda: self.picker.metric("requests_in_flight") == 0)
        self.space.pool(ports=(self.port,))
        self.picker.expect(self.known("first", "second"))
        status, _, answer = self.ask("again")
        self.assertEqual(status, 200, answer.read())


HELD = "wait in the middle"


class Engine(http.server.ThreadingHTTPServer):
    """An engine that streams. A context manager."""

    daemon_threads = True

    def __init__(self, name, address, port):
        super().__init__((address, port), _Streams)
        self.name, self.go_on = name, threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.shutdown()
        self.server_close()


class _Streams(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        """A test's output is about its failures."""

    def do_POST(self):
        asked = self.rfile.read(int(self.headers.get("content-length", 0))) or self._chunks()
        self.send_response(200)
        for name, value in (("content-type", "text/event-stream"), ("transfer-encoding", "chunked"),
                            ("x-pod", self.server.name)):
            self.send_header(name, value)
        self.end_headers()
        self._say(b"data: begins\n\n")
        if HELD.encode() in asked:
            self.server.go_on.wait(120)
        self._say(b"data: [DONE]\n\n")
        self._say(b"")

    def _chunks(self):
        """A body that was sent chunk by chunk."""
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _say(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def _free_on_all(addresses):
    """A port that is free on each of these addresses."""
    for _ in range(100):
        port = free_port()
        try:
            for address in addresses:
                with socket.socket() as probe:
                    probe.bind((address, port))
        except OSError:
            continue
        return port
    raise AssertionError("no port is free on all addresses")


if __name__ == "__main__":
    unittest.main()
