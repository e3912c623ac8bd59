"""Seeing a handoff: records, metrics, traces, codes, and the dashboard."""
