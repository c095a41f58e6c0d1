"""Lower rewritten graphs: storage formats, attention kernels, CPU products and layer sharing."""
