"""A small client for the Kubernetes API: requests with a bearer token and watches.

Lives here: HTTP, JSON, and errors. Never here: what any object means.
Invariant: every call has a timeout, and every error says which call it was.
"""

import http.client
import json
import ssl
import urllib.parse

MERGE_PATCH = "application/merge-patch+json"


class ApiError(Exception):
    """The server's answer to a call that it refused; `status` is the HTTP status, 0 when no answer came."""

    def __init__(self, call, status, message):
        super().__init__(f"{call}: {status} {message}")
        self.status = status


class Api:
    """One server, one identity. Safe to use from several threads: each call has its own connection."""

    def __init__(self, host, port, ca_file, token, timeout=10.0):
        self.host, self.port, self.token, self.timeout = host, port, token, timeout
        self.tls = ssl.create_default_context(cafile=str(ca_file))

    def get(self, path):
        return self.call("GET", path)

    def post(self, path, body):
        return self.call("POST", path, body)

    def put(self, path, body):
        return self.call("PUT", path, body)

    def patch(self, path, body):
        return self.call("PATCH", path, body, MERGE_PATCH)

    def delete(self, path, body=None):
        return self.call("DELETE", path, body)

    def create(self, path, body):
        """Creates the object, or leaves the one that is there."""
        try:
            return self.post(path, body)
        except ApiError as error:
            if error.status != 409:
                raise
            return None

    def call(self, method, path, body=None, content_type="application/json"):
        connection, response = self._send(method, path, body, content_type, self.timeout)
        try:
            data = response.read()
        except OSError as error:
            raise ApiError(f"{method} {path}", 0, str(error)) from error
        finally:
            connection.close()
        if response.status >= 300:
            raise ApiError(f"{method} {path}", response.status, _message(data))
        if data[:1] in (b"{", b"["):
            return json.loads(data)
        return data.decode()

    def watch(self, path, version, seconds=300):
        """Yields (type, object) until the server ends the watch. A 410 arrives as an `ERROR` event."""
        query = urllib.parse.urlencode({"watch": "1", "resourceVersion": version, "timeoutSeconds": seconds,
                                        "allowWatchBookmarks": "true"})
        joined = f"{path}{'&' if '?' in path else '?'}{query}"
        connection, response = self._send("GET", joined, None, None, seconds + 30)
        try:
            if response.status >= 300:
                raise ApiError(f"WATCH {path}", response.status, _message(response.read()))
            while line := response.readline():
                event = json.loads(line)
                yield event["type"], event["object"]
        except OSError as error:
            raise ApiError(f"WATCH {path}", 0, str(error)) from error
        finally:
            connection.close()

    def _send(self, method, path, body, content_type, timeout):
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self.tls)
        try:
            connection.request(method, path, body=data, headers=headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ApiError(f"{method} {path}", 0, str(error)) from error


def follow(api, path, stopped, changed, deleted, gap):
    """Keeps `changed(object)` and `deleted(object)` told of every object under `path` until `stopped()`.

    After a lost watch the list is read anew; `gap(seen)` then gets the uids that still exist.
    """
    while not stopped():
        try:
            listing = api.get(path)
            kind = {"apiVersion": listing["apiVersion"], "kind": listing["kind"].removesuffix("List")}
            for item in listing["items"]:
                changed({**kind, **item})
            gap({item["metadata"]["uid"] for item in listing["items"]})
            version = listing["metadata"]["resourceVersion"]
            for kind_of_event, item in api.watch(path, version):
                if stopped() or kind_of_event == "ERROR":
                    break
                if kind_of_event == "DELETED":
                    deleted(item)
                elif kind_of_event != "BOOKMARK":
                    changed(item)
        except ApiError:
            if stopped():
                return
            stopped(0.2)


def _message(data):
    try:
        return json.loads(data).get("message", "")
    except (ValueError, AttributeError):
        return data[:200].decode(errors="replace")
