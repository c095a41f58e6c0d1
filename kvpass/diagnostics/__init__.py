"""Diagnostics: `explain`, `inspect`, `simulate`, `warm`, and a check of the installation."""
