"""The shared KV store: blocks under content keys, put by the engine that computed them, got by any that needs them."""
