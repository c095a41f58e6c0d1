"""Kernels and CPU loops of attention and of products of few rows.

All else in a rewritten graph is plain torch.
"""
