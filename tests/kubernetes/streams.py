"""Many streamed completions at once, each read to its end.

Lives here: the client side of an upgrade without a failed request. Never here: the upgrade.
Invariant: a stream counts as whole only when its last event is `[DONE]`.
"""

import http.client
import json
import threading

from harness import MODEL


class Stream(threading.Thread):
    """One streamed completion. `trouble` is None when it was whole."""

    def __init__(self, address, number, tokens):
        super().__init__(daemon=True)
        self.address, self.number, self.tokens = address, number, tokens
        self.begun = threading.Event()
        self.trouble = "not finished"

    def run(self):
        try:
            self.trouble = self._read()
        except (OSError, http.client.HTTPException) as error:
            self.trouble = repr(error)
        self.begun.set()

    def _read(self):
        body = {"model": MODEL, "stream": True, "max_tokens": self.tokens, "ignore_eos": True,
                "messages": [{"role": "user", "content": f"stream {self.number}"}]}
        connection = http.client.HTTPConnection(self.address, timeout=90)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return f"status {answer.status}: {answer.read()[:200]!r}"
        tail = b""
        while chunk := answer.read1(65536):
            tail = (tail + chunk)[-64:]
            self.begun.set()
        connection.close()
        return None if tail.rstrip().endswith(b"data: [DONE]") else f"ended with {tail!r}"


class Steady(threading.Thread):
    """Short requests one after the other until `stop`; keeps what was not answered well."""

    def __init__(self, ask, pause=0.05):
        super().__init__(daemon=True)
        self.ask, self.pause = ask, pause
        self.ended = threading.Event()
        self.answered, self.failed = 0, []

    def run(self):
        while not self.ended.wait(self.pause):
            try:
                status, _, body = self.ask()
            except OSError as error:
                status, body = 0, repr(error)
            if status == 200:
                self.answered += 1
            else:
                self.failed.append((status, body[:200]))

    def stop(self):
        self.ended.set()
        self.join()
