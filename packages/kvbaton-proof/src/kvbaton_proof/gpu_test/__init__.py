"""One command that proves kvbaton under vLLM on this machine's GPU: `python -m kvbaton_proof.gpu_test`, `make
gpu-test`.

    python -m kvbaton_proof.gpu_test --list             the parts, and what each shows
    python -m kvbaton_proof.gpu_test                    the standard plan, at most 20 minutes on one H200
    python -m kvbaton_proof.gpu_test --quick            at most 4
    python -m kvbaton_proof.gpu_test --part answers     one part; results of other calls into the same --out stay
    python -m kvbaton_proof.gpu_test --device cpu       a rehearsal of the same plan with vLLM for CPUs, at tiny sizes

Laws: engines are plain vLLM API servers with `--kv-transfer-config`, and nothing of vLLM is imported here. A part is
judged by verdicts, each with the bound that it is held to; what could not be run is a verdict that does not hold, never
silence. Everything that is known is on disk at any time: a run that is killed has lost nothing but its last line. The
page is made of the JSON and of nothing else. All processes are gone when the command ends, however it ends.
"""
