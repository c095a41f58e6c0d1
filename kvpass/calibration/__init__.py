"""Measure what policies need of a model: statistics of its queries, and gates of its heads."""
