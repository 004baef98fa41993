"""Health probes of a container: HTTP, TCP, gRPC, exec.

Lives here: one attempt of one probe. Never here: thresholds and what a failure leads to (`pod.py`).
Invariant: an attempt ends within its timeout and never raises.
"""

import http.client
import socket
import ssl
import struct
import subprocess
import time


def attempt(probe, ports, address, run_inside):
    """True when the probe succeeds once. `ports` maps port names; `run_inside` runs a command in the container."""
    seconds = probe.get("timeoutSeconds", 1)
    try:
        if "httpGet" in probe:
            return _http(probe["httpGet"], ports, address, seconds)
        if "tcpSocket" in probe:
            with socket.create_connection((address, _port(probe["tcpSocket"]["port"], ports)), seconds):
                return True
        if "grpc" in probe:
            return _grpc(address, probe["grpc"]["port"], probe["grpc"].get("service") or "", seconds)
        if "exec" in probe:
            return run_inside(probe["exec"]["command"], seconds) == 0
    except (OSError, http.client.HTTPException, subprocess.TimeoutExpired, ValueError, LookupError):
        return False
    return False


def _port(port, ports):
    return ports[port] if isinstance(port, str) and not port.isdigit() else int(port)


def _http(action, ports, address, seconds):
    port = _port(action["port"], ports)
    host = action.get("host") or address
    if action.get("scheme") == "HTTPS":
        # kubelets do not verify the certificate of a probe either
        context = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        headers = {header["name"]: header["value"] for header in action.get("httpHeaders", [])}
        connection.request("GET", action.get("path") or "/", headers=headers)
        return 200 <= connection.getresponse().status < 400
    finally:
        connection.close()


# ---- grpc.health.v1.Health/Check over cleartext HTTP/2 (RFC 9113), just enough for one unary call -------------------

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY = 0, 1, 4, 6, 7
_SERVING = b"\x08\x01"


def _grpc(address, port, service, seconds):
    deadline = time.monotonic() + seconds
    with socket.create_connection((address, port), seconds) as stream:
        name = service.encode()
        message = b"\x0a" + bytes([len(name)]) + name if name else b""
        body = struct.pack(">BI", 0, len(message)) + message
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/grpc.health.v1.Health/Check"),
                  (":authority", f"{address}:{port}"), ("content-type", "application/grpc"), ("te", "trailers")]
        stream.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"")
                       + _frame(_HEADERS, 0x4, 1, b"".join(_literal(*pair) for pair in fields))
                       + _frame(_DATA, 0x1, 1, body))
        received = b""
        reader = stream.makefile("rb")
        while True:
            stream.settimeout(max(0.001, deadline - time.monotonic()))
            head = reader.read(9)
            if len(head) < 9:
                return False
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = reader.read(length)
            if kind == _SETTINGS and not flags & 1:
                stream.sendall(_frame(_SETTINGS, 1, 0, b""))
            elif kind == _PING and not flags & 1:
                stream.sendall(_frame(_PING, 1, 0, payload))
            elif kind == _GOAWAY:
                return False
            elif kind == _DATA:
                received += payload
                if len(received) >= 5:
                    wanted = 5 + int.from_bytes(received[1:5], "big")
                    if len(received) >= wanted:
                        return received[5:wanted] == _SERVING
            elif kind == _HEADERS and flags & 1:
                return False  # trailers without a message: the call failed


def _frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name, value):
    """A header field without indexing and without Huffman coding (RFC 7541, 6.2.2)."""
    return b"\x00" + _text(name) + _text(value)


def _text(text):
    data = text.encode()
    if len(data) > 126:
        raise ValueError("header text: expected at most 126 bytes")
    return bytes([len(data)]) + data
