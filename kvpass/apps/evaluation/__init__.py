"""Measure what a policy costs on any checkpoint: `kvpass eval`, and a model of lm-evaluation-harness."""
