"""The two attention primitives; all else in a rewritten graph is plain torch."""
