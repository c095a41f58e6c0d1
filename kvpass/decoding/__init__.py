"""Loops of steps: one conversation, prompts in chunks, many requests."""
