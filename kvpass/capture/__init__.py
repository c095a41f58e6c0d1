"""Convert Dynamo's graph to canonical operators, and prove facts about masks, padding and positions."""
