"""The attention primitives and a few row products; all else in a rewritten graph is plain torch."""
