"""Any transport with end-to-end comparison of the bytes of each copy."""
