"""What kvpass does on a GPU: one call, correctness first, then figures.

python -m benchmarks.gpu --out out/gpu
"""
