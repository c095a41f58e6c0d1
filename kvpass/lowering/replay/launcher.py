"""Launch many functions of machine code with one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from kvpass.torch_private import generated_code

COUNTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The argument counts with which a function may be called; the first sufficient one is used.

Arguments are words, so the caller removes spare ones from the stack and the function never reads them.
"""
MOST_ARGUMENTS = COUNTS[-1]
MESSAGE_BYTES = 1024  # of an error's text
CALL_WORDS = 3  # words per call: address, index of its first argument, number of arguments


def source() -> str:
    """Return C++ code that calls functions whose arguments are all 64-bit words, pointers and numbers.

    An argument is two words: the index of a base and an offset from it.  An exception ends the calls and becomes a
    message, because no exception may pass through a caller that is not C++.
    """
    cases = "\n".join(f"      {'else ' * (i > 0)}if (call[2] <= {n}) {_call(n)};" for i, n in enumerate(COUNTS))
    return f"""
#include <cstdint>
#include <cstdio>
#include <exception>
typedef int64_t word;

static void launch_all(const word* calls, word count, const word* arguments, const word* bases) {{
  word a[{MOST_ARGUMENTS}] = {{}};
  for (const word* call = calls; call != calls + {CALL_WORDS} * count; call += {CALL_WORDS}) {{
    const word* values = arguments + 2 * call[1];
    for (word i = 0; i < call[2]; ++i) a[i] = bases[values[2 * i]] + values[2 * i + 1];
{cases}
  }}
}}

extern "C" int launch(const word* calls, word count, const word* arguments, const word* bases, char* message) {{
  try {{
    launch_all(calls, count, arguments, bases);
    return 0;
  }} catch (const std::exception& error) {{
    std::snprintf(message, {MESSAGE_BYTES}, "%s", error.what());
  }} catch (...) {{
    std::snprintf(message, {MESSAGE_BYTES}, "an exception of unknown type in a compiled kernel");
  }}
  return 1;
}}
"""


def _call(count: int) -> str:
    types, values = ", ".join(["word"] * count), ", ".join(f"a[{i}]" for i in range(count))
    return f"reinterpret_cast<void (*)({types})>(call[0])({values})"


@functools.cache
def _library() -> Callable[..., int]:
    launch = generated_code.cpp_library(source()).launch
    launch.argtypes, launch.restype = [*[ctypes.c_int64] * 4, ctypes.c_char_p], ctypes.c_int
    function: Callable[..., int] = launch
    return function


def launch(calls: int, count: int, arguments: int, bases: int) -> None:
    """Call functions of machine code, one after the other; other Python threads run meanwhile.

    Args:
        calls, arguments, bases: addresses of arrays of 64-bit words, as `source` reads them.
        count: the number of calls.

    Raises:
        RuntimeError: a function threw a C++ exception; the functions after it did not run.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    if _library()(calls, count, arguments, bases, message):
        raise RuntimeError(message.value.decode(errors="replace"))
