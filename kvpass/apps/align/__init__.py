"""Train KV-Align's inference networks."""
