"""Explain, inspect, simulate, warm and check an installation."""
