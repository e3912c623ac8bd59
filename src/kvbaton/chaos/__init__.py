"""Faults on real processes: plans drawn from a seed, a hand that carries them out, oracles that judge what came of it.

faults      what can be done to a cluster, and which promise each tries
plan        which fault, to whom, when: drawn from a seed, or the standard one; kept as JSON for --replay
outcome     what was seen, row by row, and whether the promises held
fleet       the processes: start, hurt, start again, ask for their figures
network     the wires between them: partitions, delay, loss
"""
