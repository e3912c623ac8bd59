"""One BLAS thread, as a worker process sets it: bits depend on it. Before numpy is imported."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
