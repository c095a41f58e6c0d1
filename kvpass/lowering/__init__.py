"""Lower rewritten graphs: storage formats, attention kernels, CPU products, layer sharing and replay."""
