"""Test the graph utilities: nodes and sizes, aliases, cutting and splicing subgraphs."""
