"""Installs a wheel into a fresh environment, away from the checkout, and runs the main job with it.

    python tools/try_wheel.py dist/kvbaton-*.whl [--extras serve] [--proof dist/kvbaton_proof-*.whl]

Each wheel gets an environment of its own in a temporary directory, is installed with its dependencies from the package
index, and must hold what a release promises (the block mover, unless it is the pure wheel; `py.typed`; the licence).
Alone, commands that look at a cluster work and those that start engines say what to install. With the extras it runs
`kvbaton up --check`: a cluster whose every answer is compared with one engine's. Its proof is another distribution,
which the commands that need it name; with `--proof` it is installed beside, and simulates clusters.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from subprocess import PIPE, STDOUT

CHECK_S = 600
GET = "pip install 'kvbaton[serve]'"
GET_PROOF = "pip install kvbaton-proof"
ALONE = (
    ("up --check", 2, GET),
    ("worker --role prefill --name p0 --registry tcp://127.0.0.1:7700 --keys keys", 2, GET),
    ("config --list", 0, "worker.blocks"),
    ("doctor", 0, "numpy-missing"),
    ("router --help", 0, "--keys"),
    ("keys new keys p0:prefill d0:decode", 0, ""),
    ("sim --seeds 0..4", 2, GET_PROOF),
    ("chaos", 2, GET_PROOF),
    ("bench transfer", 2, GET_PROOF),
    ("conformance vllm", 2, GET_PROOF),
)
"""What is run without an extra, its exit status and what it says."""
LOOK = """\
import importlib.metadata, importlib.util, pathlib, sys
import kvbaton
root = pathlib.Path(kvbaton.__file__).parent
assert sys.prefix in str(root), f"kvbaton is imported from {root}, which is not this environment"
assert (root / "py.typed").is_file(), "py.typed is missing: type checkers ignore the package"
told = importlib.metadata.metadata("kvbaton")
assert importlib.util.find_spec("kvbaton_proof") is None, "the proof came with the product"
assert told["Version"] == kvbaton.__version__, (told["Version"], kvbaton.__version__)
assert told["License-Expression"] == "Apache-2.0" and told.get_all("License-File"), "no licence"
print("mover" if importlib.util.find_spec("kvbaton.transports.core._mover") else "pure")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--extras", default="serve", help="extras to install with each wheel (default: %(default)s)")
    parser.add_argument("--proof", type=Path, help="a wheel of kvbaton-proof to be tried beside each")
    args = parser.parse_args()
    for wheel in args.wheels:
        with tempfile.TemporaryDirectory(prefix="kvbaton-wheel-") as place:
            tried(wheel.resolve(), args.extras, Path(place), args.proof and args.proof.resolve())
    return 0


def tried(wheel: Path, extras: str, place: Path, proof: Path | None) -> None:
    with zipfile.ZipFile(wheel) as content:
        files = len(content.infolist())
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {files} files, into a fresh environment", flush=True)
    venv.create(place / "env", with_pip=True)
    python = str(place / "env" / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    def run(*argv: str, status: int = 0) -> str:
        done = subprocess.run(
            [python, *argv], cwd=place, env=clean, timeout=CHECK_S, check=False, stdout=PIPE, stderr=STDOUT
        )
        if done.returncode != status:
            raise SystemExit(f"{' '.join(argv)}: status {done.returncode}, expected {status}\n{done.stdout.decode()}")
        return done.stdout.decode()

    install = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*install, str(wheel))
    for line, status, said in ALONE:
        if said not in (told := run("-m", "kvbaton.cli.main", *line.split(), status=status)):
            raise SystemExit(f"{wheel.name} alone: kvbaton {line}: expected {said!r}, got:\n{told}")
    print(f"{wheel.name}: alone, {len(ALONE)} commands work or say what to install", flush=True)
    run(*install, f"{wheel}[{extras}]")
    found = run("-I", "-c", LOOK).strip()
    expected = "pure" if wheel.name.endswith("-none-any.whl") else "mover"
    if found != expected:
        raise SystemExit(f"{wheel.name}: expected the {expected} form, the installed one is {found}")
    print(run("-m", "kvbaton.cli.main", "up", "--check"), end="")
    print(f"{wheel.name}: kvbaton up --check passed, in an environment that has only this wheel", flush=True)
    if proof is not None:
        run(*install, str(proof))
        print(run("-m", "kvbaton.cli.main", "sim", "--seeds", "0..4"), end="")
        print(f"{proof.name}: kvbaton sim passed beside it", flush=True)


if __name__ == "__main__":
    sys.exit(main())
