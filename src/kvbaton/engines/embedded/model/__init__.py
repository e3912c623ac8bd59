"""What the embedded engine computes: a small decoder, and the next token."""
