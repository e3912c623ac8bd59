"""`kvbaton_proof.gpu_test`: its logic, without an engine."""
