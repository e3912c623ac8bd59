"""Metrics and their export to Prometheus.

names        every metric there is: the one list; the reference page is made of it
histogram    counts by size, with an example for each bucket
exposition   families of samples as text: classic, or OpenMetrics with exemplars
handoffs     what flights say: ends, stages, bytes, leases
node         what a ledger and its control plane have counted
worker       an embedded worker's page
"""
