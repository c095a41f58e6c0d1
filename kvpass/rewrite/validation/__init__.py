"""Validate translations: compare rewritten graphs with the model's own graph before anything runs on them.

    steps, prompts     choose the calls, run the graphs, and compare all but attention
    lockstep           run graphs that continue with the model's own attention
    interpreter        interpret a graph
    expected           compute attention in double precision, and its rounding error
    conversation       make the arguments of a synthetic step
    slots              make the slots that hold the tokens of a synthetic conversation
    coverage           find lengths at which a graph may change, and layers that equal an earlier one

Proofs about a graph (`kvpass.capture`) hold for all arguments.  Validation holds for some arguments, but assumes
nothing about the graph.
"""
