"""What the suite's processes are forked from: vLLM, imported once for all of them.

Law: whoever imports this pays for vLLM (ten seconds of a processor); only multiprocessing's fork server does.
"""

from __future__ import annotations

from kvbaton_proof.conformance import configs

configs.prepare()
configs.hush()
configs.warm()
