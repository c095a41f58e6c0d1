"""Show on a real model what bounding the cache costs: a chat, perplexity, retrieval, speed, and what is kept."""
