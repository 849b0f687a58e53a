# make demo    encode sentences with a real model, once with eager attention and once with portable_flash
# make test    the tests, exactly as CI runs them
# make clean   remove the environment and everything that was built
#
# A fresh machine needs Python 3.10 or newer and make; the rest goes into .venv.

PYTHON ?= python3
VENV   ?= .venv
# Arguments of pip, so an index may be added: make demo TORCH="torch==2.13.0 --index-url ..."
TORCH  ?= torch==2.13.0
# Only for the tests of a machine without a GPU, where Triton's interpreter runs the kernels.
TRITON ?= triton==3.9.0
PYTEST ?= -n 2 --dist worksteal tests

# Where a torch that already works with this machine's GPU is installed; empty if there is none. Such a torch (and the
# triton that came with it, which for ROCm is a build of its own) is used as it is and never replaced.
GPU_TORCH = $(PYTHON) -c "import pathlib, torch; torch.zeros(1, device='cuda'); print(pathlib.Path(torch.__file__).parents[1])" 2>/dev/null
# The folder of the environment's own packages.
SITE = $(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: demo test clean

demo: $(VENV)/demo.stamp
	$(VENV)/bin/python examples/demo.py

# One thread for each worker: torch would start as many as there are cores in every one of them.
test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted installation is taken up again.
$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install --editable ".[demo]"
	touch $@

$(VENV)/test.stamp: pyproject.toml $(VENV)/torch.stamp
	if [ "$$(uname -s)" = Linux ] && ! $(VENV)/bin/python -c "import triton" 2>/dev/null; then $(PIP) install $(TRITON); fi
	$(PIP) install --editable ".[test]"
	touch $@

# PYTHON may be that of an environment, whose packages --system-site-packages does not reach: a .pth file does.
$(VENV)/torch.stamp:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
	  { echo "Python 3.10 or newer is needed; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || \
	  { echo "$(PYTHON) cannot create environments: install its venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@found="$$($(GPU_TORCH))"; set -e; \
	if [ -n "$$found" ]; then \
	  echo "using the torch in $$found, which works with this machine's GPU"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	  $(VENV)/bin/python -c "import torch" 2>/dev/null || echo "$$found" > "$$($(SITE))/gpu_torch.pth"; \
	  $(VENV)/bin/python -c "import torch; torch.zeros(1, device='cuda')"; \
	else \
	  $(PYTHON) -m venv $(VENV); \
	  $(PIP) install $(TORCH); \
	fi
	touch $@
