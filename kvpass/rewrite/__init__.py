"""Rewrite canonical graphs: a prompt also returns statistics, a step runs on slots; validate both.

Each rewrite starts from a copy of the canonical graph.  A prompt graph keeps the model's attention and gets more
outputs.  In a step graph `kvpass.cache.step.decode_step` or `kvpass.cache.chunk_step.chunk_step` replaces each
attention call.  Subgraphs that depend on the growing cache are evaluated on slots instead, or removed.
"""
