"""Run prompts and steps instead of Dynamo's graphs, and choose the compiled variant for each call."""
