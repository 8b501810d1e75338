"""Train language models in parallel: small, complete, and the test bed of dtprof.

Start it with `torchrun --nproc-per-node 4 -m reference_trainer --preset tiny`.
Nothing of dtprof is imported here: a profiled program needs no line for its profiler.
"""
