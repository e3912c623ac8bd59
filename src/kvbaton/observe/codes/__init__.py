"""The catalogue of failure reasons, API error codes, log codes and doctor findings, with advice for each.

Law: data only. A reason, an error code of the API, a code in a log line and a finding of `kvbaton doctor` each have one
entry; tests compare the entries with the sources in both directions. Start at `code_catalogue.find`.
"""
