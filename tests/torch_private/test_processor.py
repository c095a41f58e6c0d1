"""Test the facts about the processor."""

from __future__ import annotations

import platform
import sys

import pytest

from kvpass.torch_private import processor


def test_instructions_are_read_where_linux_names_them() -> None:
    flags = processor.flags_of_processor()
    assert all(flag.startswith(processor.INSTRUCTIONS) for flag in flags)
    assert flags or sys.platform != "linux"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other instructions")
def test_torch_says_what_the_processor_has() -> None:
    assert {"l1d_cache_size", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "amx_tile"} <= {
        *processor._capabilities()
    }
