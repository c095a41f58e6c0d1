from importlib.util import find_spec

# These tests need the extra `demo` in addition to `test`.
needed = ("transformers", "matplotlib", "tqdm")
collect_ignore_glob = [] if all(find_spec(name) for name in needed) else ["test_*.py"]
