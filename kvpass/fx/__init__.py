"""Graph utilities: read nodes and sizes of FX graphs, find aliases, cut and splice subgraphs."""
