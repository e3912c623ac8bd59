"""Faults on real processes: plans drawn from a seed, a harness that applies them, oracles that judge the outcome.

faults      the faults, and the promise that each tests
plan, draw  fault, target and time: drawn from a seed, kept as JSON for --replay
conductor   one run on the embedded engine: cluster, load, plan, rest, verdict
fleet       the processes: start, hurt, start again, ask for their figures; members: what each is started with
network     the wires between them: partitions, delay, loss; networks: made of namespaces or of relays
breakpoints a worker is held at a named moment; worker_main: the worker's side of it
injuries    one function per fault; client_injuries, strangers: those that are requests or connections
liars       the fault `liar`: its process, its means, one function per lie; false members
judged_request  one request and its judgement, and the board: what became of each; scene: with the steady clients
rest_oracle what must be so at rest, and what the kernel counts of a process
outcome     what was seen, row by row, whether the promises held, and the pages that say so
vllm        the standard plan on real vLLM, with any connector of `rig`
"""
