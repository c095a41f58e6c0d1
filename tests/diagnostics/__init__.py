"""Test explain, inspect, simulate, warm, and the check of an installation."""
