"""Run applications: command line, demo, evaluation, aligner training; no other room imports this one."""
