#!/usr/bin/env python3
"""Alert rules and dashboards, checked with Prometheus's own tools.

    tests/observability/run.py rules   the rules are valid, and each alert's unit test passes
    tests/observability/run.py live    a demo is scraped by a real Prometheus: every query of every
                                       dashboard returns data, rules evaluate, exemplars carry trace ids

Needs `promtool` and, for `live`, `prometheus` (2.42 or later; both are in Debian's package `prometheus`, which is
installed when missing and apt-get can) and the built binary (SIDESTEP, default target/debug/sidestep).
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "sidestep"
RULES = sorted((CHART / "alerts").glob("*.yaml"))
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
TESTS = ROOT / "tests" / "observability" / "alerts.test.yaml"
PATIENCE = 180


def fail(message):
    sys.exit(f"observability: {message}")


def need(program):
    """The path of a program of the package prometheus."""
    if not shutil.which(program) and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]):
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    return shutil.which(program) or fail(f"{program}: expected in PATH (Debian: apt-get install prometheus), found nothing")


def promtool(*arguments):
    done = subprocess.run([need("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False)
    print((done.stdout + done.stderr).strip())
    if done.returncode:
        fail(f"promtool {arguments[0]} {arguments[1]} failed")


def rules():
    promtool("check", "rules", *RULES)
    alerts = {name for path in RULES for name in re.findall(r"alert: (\w+)", path.read_text())}
    # A test that only ever expects silence proves nothing.
    fires = set(re.findall(r"alertname: (\w+)\n    exp_alerts:\n    - exp_labels", TESTS.read_text()))
    if alerts != fires:
        fail(f"alerts: expected each to be shown firing by a unit test, found none for {sorted(alerts - fires)}")
    promtool("test", "rules", TESTS)
    print(f"{len(alerts)} alerts, each shown firing")


def queries():
    """Every query of every dashboard: its panel and its text."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        ids = [panel["id"] for panel in dashboard["panels"]]
        if len(ids) != len(set(ids)):
            fail(f"{path.name}: two panels share an id")
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$__rate_interval", "20s").replace("$job", ".+")
                if "$" in text:
                    fail(f"{path.name}, {panel['title']}: a variable this test does not know: {text}")
                yield f"{path.stem}: {panel['title']}", text


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def ask(base, path, **parameters):
    answer = json.loads(get(f"{base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
    if answer["status"] != "success":
        fail(f"{path} {parameters}: {answer}")
    return answer["data"]


def until(what, probe):
    """The first true value of `probe`, asked until it is there."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            found = probe()
            if found:
                return found
        except OSError:
            pass
        time.sleep(0.5)
    return fail(f"{what}: not within {PATIENCE} s")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def stop(process):
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()


def start_demo(folder, environment=None):
    """A demo that stays: the process and its picker's admin address."""
    binary = os.environ.get("SIDESTEP", str(ROOT / "target" / "debug" / "sidestep"))
    log = folder / "demo.log"
    with log.open("w") as out:
        demo = subprocess.Popen(
            [binary, "demo", "--keep", "--requests", "40", "--time-scale", "0.5"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )

    def addresses():
        if demo.poll() is not None:
            fail(f"the demo ended:\n{log.read_text()}")
        text = log.read_text()
        admin = re.search(r"http://(127\.0\.0\.1:\d+)/metrics", text)
        return admin and (admin[1], re.search(r"http://127\.0\.0\.1:\d+/v1/chat/completions", text)[0])

    try:
        return demo, *until("the demo's addresses", addresses)
    except BaseException:
        stop(demo)
        raise


class Traffic:
    """Conversations through the gateway until it is told to stop."""

    def __init__(self, url):
        self.url = url
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.converse, args=(number,)) for number in range(4)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()

    def converse(self, number):
        turn = 0
        while not self.over.is_set():
            if turn % 12 == 0:
                messages = [{"role": "user", "content": f"conversation {number} {turn} " + "more words " * 40 * (number + 1)}]
            messages.append({"role": "user", "content": f"and then, {turn}?"})
            body = {"model": "sidestep-small", "messages": messages, "max_tokens": 8, "stream": turn % 2 == 0}
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            headers = {"content-type": "application/json", "x-session-id": f"s{number}"}
            request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    answer.read()
            except OSError as fault:
                print(f"a request failed: {fault}")
            turn += 1
            self.over.wait(0.05)


def start_prometheus(folder, target):
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [{"job_name": "sidestep", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))
    promtool("check", "config", path)
    process = subprocess.Popen(
        [
            need("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
            "--log.level=warn",
        ],
        stdin=subprocess.DEVNULL,
    )
    return process, f"http://127.0.0.1:{port}"


def live():
    need("prometheus")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Recorded traces without a receiver: exemplars need no more, and dropped spans are data too.
        nobody = f"http://127.0.0.1:{free_port()}"
        demo, admin, chat = start_demo(folder, {"OTEL_EXPORTER_OTLP_ENDPOINT": nobody})
        try:
            prometheus, base = start_prometheus(folder, admin)
            try:
                with Traffic(chat):
                    check(base)
            finally:
                stop(prometheus)
        finally:
            stop(demo)


def check(base):
    def ready():
        return ask(base, "query", query="sidestep_ready")["result"]

    until("the first scrape", ready)
    left = dict(queries())
    total = sum(1 for _ in queries())

    def empty():
        missing = []
        for panel, text in queries():
            result = ask(base, "query", query=text)["result"]
            values = [value for series in result for value in [series["value"][1]] if value not in ("NaN", "+Inf", "-Inf")]
            if not values:
                missing.append((panel, text))
        return missing

    # Queries look at the last seconds, so all must have data at once, while the demo's traffic goes on.
    last = []

    def all_filled():
        last[:] = empty()
        return not last

    deadline = time.monotonic() + PATIENCE
    while not all_filled():
        if deadline < time.monotonic():
            fail("no data for:\n" + "\n".join(f"  {panel}: {text}" for panel, text in last))
        time.sleep(1)
    print(f"{total} queries on {len(left)} panels, each with data")

    broken = [rule for group in ask(base, "rules")["groups"] for rule in group["rules"] if rule["health"] == "err"]
    if broken:
        fail(f"rules that cannot be evaluated: {broken}")
    now = time.time()
    exemplars = ask(
        base, "query_exemplars", query="sidestep_time_to_first_bytes_seconds_bucket", start=now - 600, end=now
    )
    traces = {exemplar["labels"].get("trace_id", "") for series in exemplars for exemplar in series["exemplars"]}
    if not traces or not all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces):
        fail(f"exemplars: expected trace ids, found {traces}")
    print(f"{len(traces)} exemplars with a trace id")


if __name__ == "__main__":
    stages = {"rules": rules, "live": live}
    if len(sys.argv) != 2 or sys.argv[1] not in stages:
        fail(f"expected one of {', '.join(stages)}, found {sys.argv[1:]}")
    stages[sys.argv[1]]()
