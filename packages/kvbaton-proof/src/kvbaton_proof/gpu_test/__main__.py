"""`python -m kvbaton_proof.gpu_test`."""

from __future__ import annotations

import sys

from kvbaton_proof.gpu_test.command import main

if __name__ == "__main__":
    sys.exit(main())
