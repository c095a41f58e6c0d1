"""Compare kvpass with other engines on SmolLM2-135M-Instruct: `python -m benchmarks.rivals`.

Each engine is one class in one file: `openvino`, `llama_cpp`, `torch_models` and `kvpass_engines`. `contenders` lists
the contenders, `compare` measures them, and `tables` prints the results.
"""
