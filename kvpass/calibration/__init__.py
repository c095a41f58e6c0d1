"""Measure facts about a model for policies: statistics of its queries, and gates of its heads."""
