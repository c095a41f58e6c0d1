"""Translation validation: rewritten graphs are held against the model's own before anything runs on them.

    steps, prompts     what is run, on what, and what is compared beside attention
    lockstep           graphs that go on with the model's own attention
    walk               interprets a graph
    expected           attention in double precision, and its rounding error
    conversation       made-up arguments of a step; slots: the slots that hold its tokens
    constants          the numbers of tokens at which a graph may begin to do something else
    kinds              which layers are like an earlier one

What is proven about a graph (`kvpass.capture`) holds for all arguments; this holds for some, but assumes nothing.
"""
