"""Traces: a request's path through router, P and D as OpenTelemetry spans.

context   W3C `traceparent`: which trace a request belongs to
spans     a flight record as spans; pure
export    ended flights to an OTLP collector, off the threads that serve requests
otlp      the OpenTelemetry library's adapter; imported only where traces are exported
"""
