"""Faults on real processes: plans drawn from a seed, a harness that applies them, oracles that judge the outcome.

faults      the faults, and the promise that each tests
plan, draw  fault, target and time: drawn from a seed, kept as JSON for --replay
conductor   one run on the embedded engine: cluster, load, plan, rest, verdict
fleet       the processes: start, hurt, start again, ask for their figures; members: what each is started with
network     the wires between them: partitions, delay, loss; networks: made of namespaces or of relays
moments     the hand on workers: told when one is at a moment, holding it there; worker_main: the worker's side of it
injuries    one function per fault; client_injuries, poisons, strangers: those that are requests or connections
lies        what a member that lies can say; liar: the fault; liar_main, liar_post, liar_door: its process, its means;
            lies_to_engines, lies_in_shapes, lies_to_readers, lies_to_places: one function per lie
load        steady clients; asking: one request and its judgement; board: what became of each
oracle      what must be so at rest; resources: what the kernel says of a process
outcome     what was seen, row by row, and whether the promises held; seen, report, timeline: how it is told
vllm_*      the standard plan on real vLLM, with kvbaton's connector or NIXL's
"""
