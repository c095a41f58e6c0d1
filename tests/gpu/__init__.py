"""Tools for tests of compiled graphs: `tests.gpu.cuda_emission`.

Nothing is imported before it is asked for; what is here needs triton, the rest of kvpass does not.
"""
