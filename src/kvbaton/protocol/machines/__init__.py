"""The state machines of P and D, their pairing, and the ledger that drives them."""
