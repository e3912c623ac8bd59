"""Clusters on this machine: processes, keys, a router; for `up`, checks, benches and chaos."""
