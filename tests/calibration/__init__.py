"""Test what measures a model for policies: statistics of queries, and gates of heads."""
