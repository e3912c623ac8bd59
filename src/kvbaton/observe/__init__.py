"""Observability of handoffs: records, metrics, traces, codes, and the dashboard."""
