"""Show the cost of a bounded cache on a real model: a chat, perplexity, retrieval, speed, and the cached tokens."""
