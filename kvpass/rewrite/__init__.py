"""Rewrite canonical graphs: a prompt also returns statistics, a step runs on slots; validate both.

Both start from a copy of Dynamo's graph.  The prompt graph keeps its own attention and gains outputs; in
a step graph every attention call becomes `kvpass.cache.step.decode_step` (or `extend_step`), traced and
spliced in, and everything that was a function of the growing cache is asked about slots or dies.
"""
