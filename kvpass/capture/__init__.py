"""What may be concluded from a traced graph: the table of operators, and proofs that rest on it."""
