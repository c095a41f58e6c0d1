"""Report what was rewritten and held, simulate a policy, compile ahead, and check an installation."""
