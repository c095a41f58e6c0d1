"""Report what was rewritten and what is held, simulate a policy, compile ahead, and check an installation."""
