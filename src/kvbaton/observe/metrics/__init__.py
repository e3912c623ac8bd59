"""Metrics and their export to Prometheus.

names        the list of all metrics, source of the reference page
histogram    counts by size, with an example for each bucket
exposition   families of samples as text: classic, or OpenMetrics with exemplars
handoffs     metrics of flights: ends, stages, bytes, leases
node         counters of a ledger and its control plane
processes    CPU, memory, files and garbage collection of a process
worker       an embedded worker's page
"""
