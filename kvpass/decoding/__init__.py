"""Decode in loops: one conversation, prompts in chunks, or many requests."""
