"""Lower rewritten graphs: storage formats, attention kernels, CPU products, layer deduplication and replay."""
