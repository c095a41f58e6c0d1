"""Report what was rewritten and cached, simulate a policy, compile ahead, and check an installation."""
