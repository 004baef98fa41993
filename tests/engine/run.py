#!/usr/bin/env python3
"""Real engines: a vLLM on the CPU behind a real Envoy and the picker.

Proves that the picker counts a prompt as the engine does, that its index predicts the engine's own cache hits, and
that an engine that restarts, evicts or clears its cache is followed. Ends with `N passed, N failed`.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import parts

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 32  # tokens; CPU attention wants a multiple of 32
KV_BLOCKS = 96  # small, so that prompts evict each other
DEADLINE = 240  # seconds; two cores may be shared with much else


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait(what, condition, deadline=DEADLINE):
    """The first true value of `condition`."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"waited {deadline} s for {what}")


def ask(url, body=None, headers=None, timeout=120):
    """Status, headers, JSON (or text) of one request."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            status, got, text = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        status, got, text = error.code, error.headers, error.read()
    except OSError as error:
        return 0, {}, str(error)
    try:
        return status, got, json.loads(text) if text else None
    except ValueError:
        return status, got, text.decode(errors="replace")


class Process:
    """A process in a session of its own, so that its workers end with it."""

    def __init__(self, name, command, folder, env=None):
        self.log = folder / f"{name}.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def alive(self):
        return self.process.poll() is None

    def kill(self, how=signal.SIGKILL):
        try:
            os.killpg(self.process.pid, how)
        except ProcessLookupError:
            pass
        self.process.wait()

    def stop(self):
        if self.alive():
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                pass
        self.kill()


class Deployment:
    def __init__(self, stack, folder, venv, model):
        self.stack, self.folder, self.venv, self.model = stack, folder, venv, model
        self.http, self.events, self.replay = free_port(), free_port(), free_port()
        self.gateway, self.admin = free_port(), free_port()
        self.engine = None

    def start_engine(self):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
        }
        command = [self.venv / "bin/vllm", "serve", self.model, "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", self.http, "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--block-size", BLOCK, "--max-model-len", 2048, "--max-num-batched-tokens", 2048]
        command += ["--max-num-seqs", 4, "--num-gpu-blocks-override", KV_BLOCKS, "--enable-prefix-caching"]
        command += ["--enable-prompt-tokens-details", "--generation-config", "vllm"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--kv-events-config", json.dumps(events)]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        self.engine = Process("vllm", command, self.folder, env)
        self.stack.callback(self.engine.stop)

    def start_picker(self, sidestep, envoy):
        ext_proc = free_port()
        health = free_port()
        write = lambda name, text: (self.folder / name).write_text(text) and self.folder / name
        policy = write(
            "policy.yaml",
            "apiVersion: sidestep.dev/v1alpha1\nkind: DisaggregationPolicy\nmetadata: {name: engine}\n"
            "spec: {rules: [{bypass: {type: Always}}]}\n",
        )
        config = write(
            "sidestep.yaml",
            f"""apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen: {{extProc: "127.0.0.1:{ext_proc}", health: "127.0.0.1:{health}", admin: "127.0.0.1:{self.admin}"}}
models:
- name: tiny
  tokenizer: {{file: {self.model}/tokenizer.json}}
pods:
  inline:
  - name: vllm
    address: "127.0.0.1:{self.http}"
    role: both
    kvEvents: {{address: "tcp://127.0.0.1:{self.events}", replay: "tcp://127.0.0.1:{self.replay}"}}
policy: {{file: {policy}}}
""",
        )
        gateway = (ROOT / "manifests/envoy/full-duplex.yaml").read_text()
        ports = {9901: free_port(), 10000: self.gateway, 8000: self.http, 9002: ext_proc}
        gateway = re.sub(r"port_value: (\d+)", lambda m: f"port_value: {ports[int(m[1])]}", gateway)
        gateway = gateway.replace("0.0.0.0", "127.0.0.1").replace("10.0.0.11", "127.0.0.1").replace("10.0.0.12", "127.0.0.1")
        command = [envoy, "-c", write("envoy.yaml", gateway), "--disable-hot-restart", "--concurrency", "1"]
        for name, words in (("picker", [sidestep, "serve", "--config", config]), ("envoy", command)):
            self.stack.callback(Process(name, words, self.folder).stop)

    def pod(self):
        status, _, pods = ask(f"http://127.0.0.1:{self.admin}/v1/pods")
        return pods[0] if status == 200 and pods else {}

    def ready(self):
        wait("vLLM", lambda: ask(f"http://127.0.0.1:{self.http}/health")[0] == 200 or not self.engine.alive())
        assert self.engine.alive(), "vLLM ended"
        wait("the pod", lambda: self.pod().get("availability") == "ready" and self.pod().get("kv_source") == "live")
        wait("Envoy", lambda: ask(f"http://127.0.0.1:{self.gateway}/v1/models")[0] == 200)

    def send(self, path, **body):
        """A request through Envoy: the answer, and the decision made for it."""
        body = {"model": "tiny", "max_tokens": 3, "temperature": 0, **body}
        status, headers, answer = ask(f"http://127.0.0.1:{self.gateway}{path}", body)
        assert status == 200, f"{path}: status {status}: {answer}"
        _, _, decision = ask(f"http://127.0.0.1:{self.admin}/v1/decisions/{headers['x-sidestep-decision']}")
        assert decision["prompt_tokens"] == answer["usage"]["prompt_tokens"], (
            f"{path}: counted {decision['prompt_tokens']} ({decision['counted']}, {decision['encode_trouble']}),"
            f" the engine {answer['usage']['prompt_tokens']}"
        )
        assert decision["counted"] == "exact", decision["counted"]
        return answer, decision

    def settle(self):
        """Waits until every event that the engine published has been applied: the index and the engine agree on how
        many batches there were, and nothing has come for a moment."""
        last = [None, time.monotonic()]

        def quiet():
            now = self.pod().get("kv_blocks")
            if now != last[0]:
                last[:] = [now, time.monotonic()]
            return 0.3 < time.monotonic() - last[1]

        wait("events to settle", quiet)


def cached(answer):
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def predicted(decision):
    """What the engine will reuse of the blocks the index knows: never the last token of a prompt."""
    most = (decision["prompt_tokens"] - 1) // BLOCK * BLOCK
    return min(decision["cached_tokens"], most)


WORDS = "river stone lantern orchard winter copper meadow signal harbour thread".split()


def text(seed, words):
    return " ".join(WORDS[(seed * 7 + i * i + i * seed) % len(WORDS)] for i in range(words))


def prompts_are_counted_as_the_engine_counts_them(d):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "it's <b> & naïve",
                "parameters": {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}},
            },
        }
    ]
    user = {"role": "user", "content": "Hi, wörld! 日本語\n\n  x <|im_end|> 🦀"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"zeta": "Zürich", "alpha": 1}'}}
    chats = [
        {"messages": [user]},
        {"messages": [{"role": "system", "content": "Be brief."}, user]},
        {"messages": [user, {"role": "assistant", "content": "Yes."}, user]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
        {"messages": [user], "tools": tools},
        {"messages": [user], "tools": tools, "tool_choice": "none"},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [user, {"role": "assistant", "content": "So"}], "add_generation_prompt": False, "continue_final_message": True},
        {
            "messages": [
                user,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": '{"t": 20}'}]},
                user,
            ],
            "tools": tools,
        },
        {"messages": [user, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "20"}]},
        {"messages": [user], "seed": 9007199254740993, "x_vendor": {"b": 1}},
    ]
    for body in chats:
        d.send("/v1/chat/completions", **body)
    for prompt in ("hi", "  two\n\nlines\t", "ünï 日本 🦀 <|im_end|> x", [1, 15339, 15339], text(1, 500)):
        d.send("/v1/completions", prompt=prompt)
    d.send("/v1/completions", prompt="hello", add_special_tokens=False)


def the_index_predicts_the_hits_of_a_growing_conversation(d):
    messages = [{"role": "system", "content": text(2, 60)}]
    for turn in range(5):
        messages.append({"role": "user", "content": text(10 + turn, 45)})
        answer, decision = d.send("/v1/chat/completions", messages=messages, max_tokens=20, repetition_penalty=1.5)
        assert predicted(decision) == cached(answer), (turn, decision["cached_tokens"], cached(answer))
        assert (turn == 0) == (cached(answer) == 0), (turn, cached(answer))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        d.settle()


def tenants_do_not_share_a_cache(d):
    body = {"messages": [{"role": "user", "content": text(3, 120)}]}
    for salt, again in (("a", False), ("b", False), ("a", True)):
        answer, decision = d.send("/v1/chat/completions", cache_salt=salt, **body)
        assert predicted(decision) == cached(answer), (salt, decision["cached_tokens"], cached(answer))
        assert (0 < cached(answer)) == again, (salt, cached(answer))
        d.settle()


def evictions_are_followed(d):
    hits = misses = 0
    for seed in [*range(20, 32), *range(20, 32), 31, 30]:
        answer, decision = d.send("/v1/completions", prompt=text(seed, 300))
        assert predicted(decision) == cached(answer), (seed, decision["cached_tokens"], cached(answer))
        hits, misses = hits + (0 < cached(answer)), misses + (cached(answer) == 0)
        d.settle()
    assert 0 < hits and 12 < misses, f"{hits} hits, {misses} misses: expected both, and evictions"


def a_cleared_cache_is_followed(d):
    prompt = text(40, 200)
    d.send("/v1/completions", prompt=prompt)
    d.settle()
    status, _, _ = ask(f"http://127.0.0.1:{d.http}/reset_prefix_cache", {})
    assert status == 200, status
    # The engine tells of it with its next step, so one prediction may be too high; the one after is right again.
    d.send("/v1/completions", prompt=text(41, 10))
    d.settle()
    answer, decision = d.send("/v1/completions", prompt=prompt)
    assert (predicted(decision), cached(answer)) == (0, 0), (decision["cached_tokens"], cached(answer))


def a_restarted_engine_starts_empty(d):
    prompt = text(50, 200)
    d.send("/v1/completions", prompt=prompt)
    d.settle()
    d.engine.kill()
    wait("the pod to be gone", lambda: d.pod().get("availability") != "ready")
    status, _, answer = ask(f"http://127.0.0.1:{d.gateway}/v1/completions", {"model": "tiny", "prompt": prompt})
    assert status == 503 and answer["error"]["code"] == "no_decode_pod", (status, answer)
    d.start_engine()
    d.ready()
    answer, decision = d.send("/v1/completions", prompt=prompt)
    assert (predicted(decision), cached(answer)) == (0, 0), (decision["cached_tokens"], cached(answer))
    d.settle()
    answer, decision = d.send("/v1/completions", prompt=prompt)
    assert predicted(decision) == cached(answer) and 0 < cached(answer), (decision["cached_tokens"], cached(answer))


TESTS = [
    prompts_are_counted_as_the_engine_counts_them,
    the_index_predicts_the_hits_of_a_growing_conversation,
    tenants_do_not_share_a_cache,
    evictions_are_followed,
    a_cleared_cache_is_followed,
    a_restarted_engine_starts_empty,
]


def record(d, path):
    """Requests to the engine itself with the tokens it made of them, for the Rust side to compare."""
    chat = {"model": "tiny", "messages": [{"role": "system", "content": text(4, 30)}, {"role": "user", "content": "ünï 日本"}]}
    steps = []
    for name, at, request in (
        ("chat", "/tokenize", {**chat, "add_generation_prompt": True}),
        ("continued", "/tokenize", {**chat, "add_generation_prompt": False}),
        ("prompt", "/tokenize", {"model": "tiny", "prompt": "Hello world <|im_end|>", "add_special_tokens": True}),
        ("bare prompt", "/tokenize", {"model": "tiny", "prompt": "Hello\n\n  world", "add_special_tokens": False}),
        ("answer", "/v1/chat/completions", {**chat, "max_tokens": 2}),
    ):
        status, _, response = ask(f"http://127.0.0.1:{d.http}{at}", request)
        steps.append({"step": name, "path": at, "request": request, "status": status, "response": response})
    path.write_text(json.dumps({"steps": steps}))


def main():
    venv = parts.vllm()
    python = venv / "bin/python"
    model, golden = parts.tiny_model(python), parts.golden_templates(python)
    cargo = ["cargo", "build", "--locked", "--bin", "sidestep", "--message-format=json-render-diagnostics"]
    built = parts.run(*cargo, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    sidestep = next(json.loads(line)["executable"] for line in built.splitlines() if '"executable":"' in line)
    envoy = parts.run(sidestep, "demo", "--print-envoy", stdout=subprocess.PIPE, text=True).stdout.strip()
    passed = failed = 0
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        d = Deployment(stack, folder, venv, model)
        d.start_engine()
        d.start_picker(sidestep, envoy)
        try:
            d.ready()
        except AssertionError:
            print((folder / "vllm.log").read_text(errors="replace")[-4000:])
            raise
        record(d, folder / "capture.json")
        for test in TESTS:
            name = test.__name__.replace("_", " ")
            started = time.monotonic()
            try:
                test(d)
            except Exception:
                failed += 1
                traceback.print_exc()
                print(f"FAILED {name}", flush=True)
                for log in ("picker", "vllm"):
                    print(f"---- {log}\n{(folder / f'{log}.log').read_text(errors='replace')[-2000:]}")
            else:
                passed += 1
                print(f"ok     {name} ({time.monotonic() - started:.1f} s)", flush=True)
        env = {
            **os.environ,
            "SIDESTEP_TEMPLATE_GOLDEN": str(golden),
            "SIDESTEP_ENGINE_CAPTURE": str(folder / "capture.json"),
            "SIDESTEP_ENGINE_MODEL": str(parts.tokenizer("qwen3")),
        }
        rust = subprocess.run(["cargo", "test", "--locked", "--test", "engine"], cwd=ROOT, env=env, capture_output=True, text=True)
        print(rust.stdout, rust.stderr[-2000:])
        result = re.search(r"^test result: \w+\. (\d+) passed; (\d+) failed", rust.stdout, re.M)
        passed += int(result[1]) if result else 0
        failed += int(result[2]) if result else 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except parts.Missing as missing:
        print(f"a part that these tests need cannot be had: {missing}\n0 passed, 1 failed")
        sys.exit(1)
