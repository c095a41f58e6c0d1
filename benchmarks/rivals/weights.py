"""Write the weights of the checkpoint as GGUF files, in the types that the rivals read.

The package of the checkpoint has a GGUF file with 4-bit weights. Every contender gets its values: dequantised and
rounded to bfloat16, or quantised to int8 in blocks of 32. F16 represents all but the smallest values of bfloat16
exactly.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from kvpass.apps import checkpoint

FILE_TYPES = {"F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type of the format's specification
WRITTEN = ("GGUF.", "general.architecture", "general.file_type")  # keys that the writer adds


def gguf(kind: str, folder: Path) -> Path:
    """Return a GGUF file of the checkpoint with matrices of one type; write it if it is missing.

    Args:
        kind: "BF16", "F16" or "Q8_0".
    """
    file = folder / f"{checkpoint.NAME}.{kind}.gguf"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            written = Path(unfinished) / file.name
            _write(checkpoint.packaged_file(), written, Type[kind])
            written.rename(file)
    return file


def _write(source: Path, to: Path, kind: Type) -> None:
    reader, writer = GGUFReader(source), GGUFWriter(to, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(WRITTEN):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(FILE_TYPES[kind.name])
    for tensor in reader.tensors:
        values, is_matrix = dequantize(tensor.data, tensor.tensor_type), len(tensor.shape) > 1
        rounded = values if kind == Type.Q8_0 or not is_matrix else _bfloat16(values)
        written = kind if is_matrix else Type.F32
        writer.add_tensor(tensor.name, quantize(rounded, written), raw_dtype=written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return float32 values rounded to bfloat16."""
    return dequantize(quantize(values, Type.BF16), Type.BF16)
