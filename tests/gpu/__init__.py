"""Inspect GPU code of compiled graphs, without a GPU: `tests.gpu.cuda_emission`.

Submodules are imported on demand, because they need triton.
"""
