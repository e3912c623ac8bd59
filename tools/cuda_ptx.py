"""Compiles `cuda_move.cu` to PTX and writes `cuda_move.ptx`. Needs NVRTC (pip install nvidia-cuda-nvrtc-cu12), no GPU.

    python tools/cuda_ptx.py [path of libnvrtc] [--set TEAM=32 --set LOADS=2 --to other.ptx]

Another shape of the kernel, by `--set`, goes to a file of its own, for `python -m
kvbaton_proof.bench.device.device_share --ptx`.
NVRTC 12.4 is what the PTX here was made by: newer ones write PTX that older drivers refuse.

PTX is assembler for a virtual machine: the driver of whatever GPU is there translates it when it is loaded, so nothing
but the driver is needed to run it, on compute capability 7.0 and later.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import hashlib
from pathlib import Path

ARCHITECTURE = "compute_70"
FOLDER = Path(__file__).parent.parent / "src" / "kvbaton" / "transports" / "cuda"
HEAD = "// cuda_move.cu, compiled for {architecture} by tools/cuda_ptx.py; SHA-256 of the source: {digest}\n"


def compile_ptx(library: str, source: bytes, values: list[str]) -> str:
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    _ok(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"cuda_move.cu", 0, None, None))
    told = [f"--gpu-architecture={ARCHITECTURE}", *(f"--define-macro={value}" for value in values)]
    options = (ctypes.c_char_p * len(told))(*(option.encode() for option in told))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    if failed:
        _ok(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _ok(nvrtc.nvrtcGetProgramLog(program, log))
        raise SystemExit(log.value.decode())
    _ok(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetPTX(program, text))
    return text.value.decode()


def _ok(status: int) -> None:
    if status:
        raise SystemExit(f"NVRTC says {status}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", nargs="?", default=ctypes.util.find_library("nvrtc") or "libnvrtc.so.12")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--to", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.set and args.to is None:
        parser.error("--set needs --to: cuda_move.ptx is the source as it is")
    source = (FOLDER / "cuda_move.cu").read_bytes()
    lines = [line.split("//")[0].rstrip() for line in compile_ptx(args.library, source, args.set).splitlines()]
    ptx = "\n".join(line for line in lines if line) + "\n"
    if args.to is not None:
        args.to.write_text(ptx)
        return
    digest = hashlib.sha256(source).hexdigest()
    (FOLDER / "cuda_move.ptx").write_text(HEAD.format(architecture=ARCHITECTURE, digest=digest) + ptx)


if __name__ == "__main__":
    main()
