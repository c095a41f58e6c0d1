"""Run prompts and steps in place of Dynamo's graphs, and choose the compiled variant for each call."""
