"""A proxy between the picker and an API server that delays, refuses and cuts what a test wants.

Lives here: HTTP passed on as it comes, watches streamed. Never here: what any object means.
Invariant: what is not held, refused or cut reaches the real server, and its answer comes back unchanged.
"""

import contextlib
import http.client
import http.server
import json
import pathlib
import re
import socket
import struct
import threading
import time

# Closing such a socket resets its connection instead of ending it.
RESET = struct.pack("ii", 1, 0)


class Between:
    """The proxy. A context manager."""

    def __init__(self, cluster, page=None):
        self.cluster = cluster
        # Objects per page of a list, instead of what the picker asks for.
        self.page = page
        self.down = False
        self.lock = threading.Lock()
        self.open = {}
        self.refusals, self.refused_at = [], None
        self.hold = None
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.between = self

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.cut()
        self.server.server_close()

    def kubeconfig(self, direct):
        """The same identity, by way of the proxy."""
        config = json.loads(pathlib.Path(direct).read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.server.server_address[1]}"}
        path = pathlib.Path(direct).with_suffix(".between")
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))
        return path

    def cut(self, parts=()):
        """Resets the connections whose last request has all `parts` in its path."""
        with self.lock:
            for client, (path, upstream) in list(self.open.items()):
                if not _has(path, parts):
                    continue
                with contextlib.suppress(OSError):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    client.shutdown(socket.SHUT_RD)
                with contextlib.suppress(OSError, AttributeError):
                    upstream.sock.shutdown(socket.SHUT_RDWR)

    def refuse(self, parts, status, times=1):
        """Answers the next requests whose path has all `parts` in it with this status."""
        with self.lock:
            self.refusals.append([parts, status, times])

    def refusal(self, path):
        with self.lock:
            for one in self.refusals:
                if one[2] and _has(path, one[0]):
                    one[2] -= 1
                    self.refused_at = time.monotonic()
                    return one[1]
        return None

    def refuses(self):
        """Whether there is anything left to refuse."""
        with self.lock:
            return any(one[2] for one in self.refusals)

    @contextlib.contextmanager
    def held(self, parts):
        """Holds requests whose path has all `parts` in it while inside; gives an event that the first of them sets."""
        arrived, release = threading.Event(), threading.Event()
        with self.lock:
            self.hold = (parts, arrived, release)
        try:
            yield arrived
        finally:
            with self.lock:
                self.hold = None
            release.set()


def _has(path, parts):
    return all(part in path for part in parts)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def verify_request(self, request, _):
        return not self.between.down

    def shutdown_request(self, request):
        # Without the polite end, so that a connection that is to be reset is.
        with self.between.lock:
            self.between.open.pop(request, None)
        self.close_request(request)

    def handle_error(self, *_):
        """The picker may leave at any time."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """A test's output is about its failures."""

    def do_GET(self):
        between, path = self.server.between, self.path
        if between.page:
            path = re.sub(r"limit=\d+", f"limit={between.page}", path)
        cluster = between.cluster
        upstream = http.client.HTTPSConnection(cluster.address, cluster.port, timeout=120, context=cluster.api.tls)
        with between.lock:
            between.open[self.request] = (path, upstream)
            hold = between.hold
        if hold and _has(path, hold[0]):
            hold[1].set()
            hold[2].wait(60)
        status = between.refusal(path)
        if status:
            return self._whole(status, json.dumps({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status,
                "reason": "Expired" if status == 410 else "InternalError", "message": "as the test wants"}).encode())
        try:
            kept = {name: self.headers[name] for name in ("Authorization", "Accept") if name in self.headers}
            upstream.request("GET", path, headers=kept)
            answer = upstream.getresponse()
            if "watch=" in path and answer.status == 200:
                return self._stream(answer)
            return self._whole(answer.status, answer.read())
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            upstream.close()

    def _whole(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, answer):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while chunk := answer.read1(65536):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        # The server's own end of a watch; a cut one has no last chunk.
        if answer.isclosed():
            self.wfile.write(b"0\r\n\r\n")
