"""An engine's transports and store when they live in the processes of its ranks: links, hosts and their messages."""
