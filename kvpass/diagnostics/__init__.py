"""Report what was rewritten and cached, simulate a policy, and check an installation."""
