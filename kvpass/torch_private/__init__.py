"""Collect every private name of torch that kvpass uses, by subsystem; no other room imports one.

Write each under its full name: tests/torch_private/names.py reads the names from these sources, and lists names that
have none here.  The docstring of the function that uses a name says what happens without it.
"""
