"""Decode in loops: conversations, prompts in chunks, or many requests; compile ahead, save and export."""
