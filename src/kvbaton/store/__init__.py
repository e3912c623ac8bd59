"""The shared KV store: blocks under content keys, put by whoever computed them, got by whoever needs them."""
