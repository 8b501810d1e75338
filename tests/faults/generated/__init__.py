"""Faults composed by a grammar, simulated on records: rates of verdicts by class, and how sure they may be.

`templates` says what sound programs do, rank by rank; `mutations` puts a fault in one; `machine` lets it run, by rules
of its own (it matches nothing with code of the diagnosis), and gives the records; `scores` compares
verdicts with truth.
"""
