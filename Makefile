PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test slow lint clean

# The main job: tables, pictures and completions in out/ (about ten minutes on two cores).
demo: $(INSTALLED)
	$(BIN)/kvpass demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

# 5 is pytest's way to say that nothing was collected.
slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow || [ $$? -eq 5 ]

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo,test,dev]'
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find kvpass tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
