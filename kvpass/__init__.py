"""Bound the KV cache of any PyTorch language model, through torch.compile.

torch.compile(model, backend=kvpass.backend(policy="h2o", budget=1024))
"""

from kvpass import policies
from kvpass.backend import Backend, backend, compile
from kvpass.calibration.query_statistics import calibrate
from kvpass.decoding.artifacts import export, load
from kvpass.decoding.cache_files import load_cache, save_cache
from kvpass.decoding.compile_ahead import warm
from kvpass.decoding.loop import DecodeLoop
from kvpass.decoding.prefill import prefill
from kvpass.decoding.requests import GenerationOutput, RequestStatus
from kvpass.diagnostics.report import CacheReport, ExplainReport, explain, inspect
from kvpass.diagnostics.simulate import Trace, simulate
from kvpass.errors import (
    AlignerError,
    ArtifactError,
    BudgetError,
    CacheFileError,
    CacheHandleError,
    CalibrationError,
    CheckpointError,
    KVPassError,
    KVPassWarning,
    LookupRangeError,
    PolicyError,
    RequestError,
    ShardingError,
    UnreadableGraph,
    UnsupportedGraph,
)
from kvpass.policies.calibration import Calibration
from kvpass.policies.head_gates import HeadGates

__all__ = [
    "AlignerError",
    "ArtifactError",
    "Backend",
    "BudgetError",
    "CacheFileError",
    "CacheHandleError",
    "CacheReport",
    "Calibration",
    "CalibrationError",
    "CheckpointError",
    "DecodeLoop",
    "ExplainReport",
    "GenerationOutput",
    "HeadGates",
    "KVPassError",
    "KVPassWarning",
    "LookupRangeError",
    "PolicyError",
    "RequestError",
    "RequestStatus",
    "ShardingError",
    "Trace",
    "UnreadableGraph",
    "UnsupportedGraph",
    "backend",
    "calibrate",
    "compile",
    "explain",
    "export",
    "inspect",
    "load",
    "load_cache",
    "policies",
    "prefill",
    "save_cache",
    "simulate",
    "warm",
]
