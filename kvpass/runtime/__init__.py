"""Runtime of rewritten graphs: prompt runners fill the slots of a cache, step runners read and update the slots."""
