"""Collect every private name of torch that kvpass uses, by subsystem; no other room imports one.

Write each under its full name, or list it in `methods`: `kvpass doctor` reads the names from these sources.  The
docstring of the function that uses a name says what a missing one means.
"""
