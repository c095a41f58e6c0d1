"""Read nodes and sizes of FX graphs, find aliases, and cut and splice subgraphs."""
