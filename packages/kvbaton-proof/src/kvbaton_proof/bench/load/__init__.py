"""The open-loop load that benchmarks share: requests by a plan in, a record of each out, against any OpenAI address."""
