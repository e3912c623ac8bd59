"""`kvbaton.gpu_test`: its logic, without an engine."""
