"""Compiles `cuda_move.cu` to PTX and writes `cuda_ptx.py`. Needs NVRTC (pip install nvidia-cuda-nvrtc-cu12), no GPU.

    python tools/cuda_ptx.py [path of libnvrtc]

PTX is assembler for a virtual machine: the driver of whatever GPU is there translates it when it is loaded, so nothing
but the driver is needed to run it, on compute capability 7.0 and later.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import sys
from pathlib import Path

ARCHITECTURE = "compute_70"
FOLDER = Path(__file__).parent.parent / "src" / "kvbaton" / "transports"
HEAD = '''"""`cuda_move.cu` as PTX, for {architecture} and later: written by tools/cuda_ptx.py, never by hand."""

SOURCE_SHA256 = "{digest}"
ENTRY = b"kvbaton_move"
THREADS = 512
PTX = r"""{ptx}"""
'''


def compile_ptx(library: str, source: bytes) -> str:
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    _ok(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"cuda_move.cu", 0, None, None))
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={ARCHITECTURE}".encode())
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
    library = sys.argv[1] if len(sys.argv) > 1 else ctypes.util.find_library("nvrtc") or "libnvrtc.so.12"
    source = (FOLDER / "cuda_move.cu").read_bytes()
    lines = [line.split("//")[0].rstrip() for line in compile_ptx(library, source).splitlines()]
    ptx = "\n".join(line for line in lines if line) + "\n"
    digest = hashlib.sha256(source).hexdigest()
    (FOLDER / "cuda_ptx.py").write_text(HEAD.format(architecture=ARCHITECTURE, digest=digest, ptx=ptx))


if __name__ == "__main__":
    main()
