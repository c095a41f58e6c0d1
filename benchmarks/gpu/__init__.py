"""Check and time kvpass on a GPU: correctness first, then figures.

python -m benchmarks.gpu --out out/gpu
"""
