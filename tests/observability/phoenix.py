#!/usr/bin/env python3
"""A demo's traces in a real trace viewer (Arize Phoenix, 850 MB installed): run by hand.

    pip install arize-phoenix
    tests/observability/phoenix.py [SCREENSHOT.png]

Starts Phoenix on loopback, a demo that exports to it, and asks Phoenix for what it received: each trace has one
`pick` span with a span per stage below it, and its attributes. With a file name, takes a screenshot of one trace
with Chromium (CHROMIUM, default `chromium`).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import run

# Its first start builds a database, which takes minutes on a busy machine.
run.PATIENCE = 900


def graphql(base, query):
    body = json.dumps({"query": query}).encode()
    request = urllib.request.Request(f"{base}/graphql", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())["data"]


def spans(base):
    query = """{projects {edges {node {id name spans(first: 500) {edges {node {
        name parentId attributes trace {traceId}}}}}}}}"""
    projects = graphql(base, query)["projects"]["edges"]
    return [
        {**edge["node"], "project": project["node"]["id"]}
        for project in projects
        for edge in project["node"]["spans"]["edges"]
    ]


def main(screenshot):
    phoenix = os.environ.get("PHOENIX", shutil.which("phoenix") or "phoenix")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        web, grpc = run.free_port(), run.free_port()
        base = f"http://127.0.0.1:{web}"
        settings = {
            "PHOENIX_WORKING_DIR": name,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(web),
            "PHOENIX_GRPC_PORT": str(grpc),
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }
        log = (folder / "phoenix.log").open("w")
        viewer = subprocess.Popen(
            [phoenix, "serve"], env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        demo = None
        try:
            run.until("Phoenix", lambda: run.get(f"{base}/healthz") is not None)
            demo, *_ = run.start_demo(folder, {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{grpc}"})
            found = run.until("spans in Phoenix", lambda: [] if len(spans(base)) < 40 * 6 else spans(base))
            check(found)
            if screenshot:
                shoot(base, found, screenshot)
        finally:
            if demo:
                run.stop(demo)
            run.stop(viewer)


def check(found):
    traces = {}
    for span in found:
        traces.setdefault(span["trace"]["traceId"], []).append(span)
    whole = [trace for trace in traces.values() if len(trace) == 6]
    for trace in whole:
        roots = [span for span in trace if span["name"] == "pick"]
        below = sorted(span["name"] for span in trace if span["parentId"])
        if len(roots) != 1 or below != ["book", "decide", "encode", "observe", "parse"]:
            run.fail(f"a trace: expected pick and its stages, found {[span['name'] for span in trace]}")
        text = roots[0]["attributes"]
        if not all(word in text for word in ("because", "net_new_tokens", "sidestep-small")):
            run.fail(f"attributes of pick: {text}")
    if len(whole) < 30:
        run.fail(f"expected 30 whole traces, found {len(whole)} of {len(traces)}")
    print(f"{len(whole)} traces in Phoenix, each one pick span with five below it")


def shoot(base, found, path):
    pick = next(span for span in found if span["name"] == "pick" and "net_new" in span["attributes"])
    url = f"{base}/projects/{pick['project']}/traces/{pick['trace']['traceId']}"
    command = [
        os.environ.get("CHROMIUM", "chromium"),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1600,1100",
        "--virtual-time-budget=15000",
        f"--screenshot={Path(path).resolve()}",
        url,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"{url} -> {path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
