"""Hold KV-Align's networks: run them, save and load them.

    aligner = kvpass.policies.aligners.load("aligner.safetensors", model)
    kvpass.compile(model, policy="kv_align", budget=128, aligner=aligner)

Importing this package does not import safetensors, which `load` and `save` need.
"""

from kvpass.policies.aligners.aligner import Aligner, identity_aligner, load, save
from kvpass.policies.aligners.scope import AlignerScope

__all__ = ["Aligner", "AlignerScope", "identity_aligner", "load", "save"]
