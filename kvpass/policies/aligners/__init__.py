"""KV-Align's networks: collect data from a model, train them, save and load them.

    aligner = kvpass.policies.aligners.load("aligner.safetensors", model)
    kvpass.compile(model, policy="kv_align", budget=128, aligner=aligner)

Importing this package imports torch and nothing else; safetensors and tqdm are imported when they are used.
"""

from kvpass.policies.aligners.aligner import Aligner, Signature, nothing
from kvpass.policies.aligners.store import load, save

__all__ = ["Aligner", "Signature", "load", "nothing", "save"]
