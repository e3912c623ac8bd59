"""Networks to do harm on: namespaces where allowed, relays elsewhere."""
