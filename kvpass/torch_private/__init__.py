"""Collect every private name of torch that kvpass uses, by subsystem; no other room imports one."""
