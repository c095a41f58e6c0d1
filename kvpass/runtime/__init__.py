"""What runs in place of Dynamo's graphs: prompts fill slots, steps work on them; handles stand for them in models."""
