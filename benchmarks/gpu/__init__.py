"""Check and time kvpass on a GPU: correctness first, then times.

python -m benchmarks.gpu --out out/gpu
"""
