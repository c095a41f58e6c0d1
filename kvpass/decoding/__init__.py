"""Decode loops: one conversation, prompts in chunks, and many requests."""
