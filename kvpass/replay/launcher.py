"""One call for many functions of machine code."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from kvpass import compat

MOST = 160  # arguments of a function
LAUNCH = 3  # words that say what is called: address, place of its first argument, number of arguments


def source() -> str:
    """C++ that calls functions whose arguments are all words of 64 bits, pointers and numbers.

    An argument is two words: a base's place and what is added to that base.
    """
    cases = "\n".join(f"      case {count}: {_call(count)}; break;" for count in range(1, MOST + 1))
    return f"""
#include <cstdint>
typedef int64_t word;

extern "C" void launch(const word* calls, word count, const word* arguments, const word* bases) {{
  word a[{MOST}];
  for (const word* call = calls; call != calls + {LAUNCH} * count; call += {LAUNCH}) {{
    const word* given = arguments + 2 * call[1];
    for (word i = 0; i < call[2]; ++i) a[i] = bases[given[2 * i]] + given[2 * i + 1];
    switch (call[2]) {{
{cases}
    }}
  }}
}}
"""


def _call(count: int) -> str:
    types, given = ", ".join(["word"] * count), ", ".join(f"a[{place}]" for place in range(count))
    return f"reinterpret_cast<void (*)({types})>(call[0])({given})"


@functools.cache
def launcher() -> Callable[[int, int, int, int], None]:
    """`launch`, which takes addresses of 64-bit words and their number, and lets other threads of Python run."""
    launch = compat.cpp_library(source()).launch
    launch.argtypes, launch.restype = [ctypes.c_int64] * 4, None
    made: Callable[[int, int, int, int], None] = launch
    return made
