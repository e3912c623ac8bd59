"""Any transport with the bytes of each copy compared end to end."""
