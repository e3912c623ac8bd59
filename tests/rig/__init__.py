"""`kvbaton.proof.rig`: its logic, without a vLLM."""
