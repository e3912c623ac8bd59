"""`kvbaton_proof.rig`: its logic, without a vLLM."""
