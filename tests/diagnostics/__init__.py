"""Test explain, inspect, simulate, and the check of an installation."""
