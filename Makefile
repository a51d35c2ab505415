# Wraps cargo and the scripts beside the code; nothing is decided here.
# Variables given on the command line reach them all: make lab SCENARIO=link-flap

SHELL := /bin/bash
.DEFAULT_GOAL := help

# What the node programs are built for. Static (musl) is worth most of the start-up
# time of the two programs that run once for each pod interface.
TARGET ?= $(shell uname -m)-unknown-linux-musl
# release, or quick: compiled quickly, for trying things out.
PROFILE ?= release
# Where the programs are left, and where every test finds them.
BIN_DIR ?= $(if $(filter release,$(PROFILE)),dist,target/bin-$(PROFILE))
# For image and release: amd64, arm64 or both, this machine's unless named. Programs of another
# architecture than this machine's are left in a folder of its name below BIN_DIR; their C compiler is
# aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu).
HERE := $(patsubst aarch64,arm64,$(patsubst x86_64,amd64,$(shell uname -m)))
ARCH ?= $(HERE)
FOREIGN := $(filter-out $(HERE),$(ARCH))
# The folders of their programs.
FOLDERS := $(if $(filter $(HERE),$(ARCH)),$(BIN_DIR)) $(addprefix $(BIN_DIR)/,$(FOREIGN))
TARGET_amd64 := x86_64-unknown-linux-musl
TARGET_arm64 := aarch64-unknown-linux-musl
# A test machine adds the stand-ins.
PROGRAMS ?= rdma-device-plugin rdma-netdev rdma-ipam rdma-agent rdmactl
CARGO ?= cargo
# More flags of cargo build.
FLAGS ?=
# More flags of cargo for what is checked and tested.
export TEST_FLAGS ?=

export RDMA_BIN_DIR = $(abspath $(BIN_DIR))

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: build
build: ## the node programs, static, into dist/ (PROFILE=quick: into target/bin-quick/)
	@set -e; target=$(TARGET); \
	has_std() { [ -d "$$(rustc --print target-libdir --target "$$1" 2>/dev/null)" ]; }; \
	has_std "$$target" || rustup target add "$$target" || true; \
	if ! has_std "$$target" && [ "$${target%%-*}" != "$$(uname -m)" ]; then \
	  echo "the Rust target $$target is not here and could not be added: rustup target add $$target" >&2; \
	  exit 1; \
	fi; \
	if ! has_std "$$target"; then \
	  target=$$(rustc -vV | sed -n 's/^host: //p'); \
	  echo "the Rust target $(TARGET) is not here and could not be added; building for $$target instead:" \
	    "the programs start more slowly and cannot be used in an image" >&2; \
	fi; \
	$(CARGO) build --locked $(FLAGS) --profile $(PROFILE) --target "$$target" $(foreach p,$(PROGRAMS),--bin $(p)); \
	install -D -p -m 0755 -t $(BIN_DIR) \
	  $(foreach p,$(PROGRAMS),"$${CARGO_TARGET_DIR:-target}/$$target/$(PROFILE)/$(p)"); \
	echo "programs for $$target in $(BIN_DIR)/"

# Programs of this architecture, which is not this machine's.
.PHONY: build-amd64 build-arm64
build-amd64 build-arm64: build-%:
	$(MAKE) --no-print-directory build TARGET=$(TARGET_$*) BIN_DIR=$(BIN_DIR)/$*

.PHONY: check
check: ## format, lints, absences; dependencies and scripts where cargo-deny and shellcheck are installed
	@# Each file by itself: cargo fmt passes over a module that a macro declares.
	git ls-files -z '*.rs' | xargs -0 rustfmt --check --edition 2024
	$(CARGO) clippy --locked $(TEST_FLAGS) --workspace --all-targets -- -D warnings
	@# Without libFuzzer itself, which is C++.
	CUSTOM_LIBFUZZER_PATH=/absent $(CARGO) clippy --locked $(TEST_FLAGS) --manifest-path fuzz/Cargo.toml --target-dir target -- -D warnings
	tests/absences
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny --locked check bans licenses sources; \
	else echo "cargo-deny is not installed: dependencies were not checked"; fi
	@if command -v shellcheck >/dev/null; then \
	  git ls-files -z | xargs -0 grep -lIE '^#!/bin/(ba)?sh' | xargs shellcheck --severity=warning --exclude=SC1090; \
	else echo "shellcheck is not installed: scripts were not checked"; fi

.PHONY: test
test: build ## everything that is tested, lab included; ends with N passed, N failed, N skipped
	tests/all

.PHONY: lab
lab: build ## the scenarios that need a real RDMA stack, in virtual machines (SCENARIO=name for one)
	tests/lab/run $(SCENARIO)

.PHONY: lab-more lab-debian13 lab-arm64
lab-more: lab-debian13 lab-arm64 release ## what is too slow for every change: lab-debian13, lab-arm64, release
# Linux 6.12 and containerd 1.7, and the programs as they are released.
lab-debian13: build
	RDMA_LAB_DEBIAN=13 tests/lab/run $(or $(SCENARIO),footing pods move exclusive hostile cdi ipoib ib-move ib-pods)
# Emulated; with one image of both architectures.
lab-arm64: build
	$(MAKE) --no-print-directory build PROFILE=quick TARGET=$(TARGET_arm64) BIN_DIR=target/bin-quick/arm64
	OUT=$(CURDIR)/target/both.tar manifests/image/build dist target/bin-quick/arm64
	manifests/image/check target/both.tar
	RDMA_LAB_ARCH=arm64 RDMA_BIN_DIR=$(abspath target/bin-quick/arm64) \
	  RDMA_LAB_PATIENCE=$${RDMA_LAB_PATIENCE:-4} tests/lab/run $(or $(SCENARIO),footing pods move hostile)

# Compiled quickly, not well: what it shows is the same.
.PHONY: demo
demo: PROFILE := quick
demo: BIN_DIR := target/bin-demo
demo: ## two pods talk RDMA, shown step by step, in a virtual machine (HOST=1: on this machine)
	HOST=$(HOST) BUILD=$(PROFILE) tests/lab/demo

.PHONY: bench-cni
bench-cni: build ## ADD and DEL beside the reference plugins, wall and CPU time, as ratios of one run
	tests/bench/cni

.PHONY: bench-ipam
bench-ipam: build ## ADD and DEL of rdma-ipam beside host-local, from 100 to 65,000 leases, as ratios of one run
	tests/bench/ipam

.PHONY: bench-subnets
bench-subnets: ## 500 nodes' addresses on a real API server that is killed meanwhile, 250 in one /24: uniqueness, rate, requests
	tests/bench/subnets

.PHONY: bench-nodes
bench-nodes: ## 1,000 nodes' RdmaNodes on a real API server while ports flap: requests, bytes, processor time
	tests/bench/nodes

.PHONY: bench-late
bench-late: build ## what late binding adds to an ADD, beside a unit that names its NIC
	tests/bench/late

.PHONY: bench-device-plugin
bench-device-plugin: build ## start, memory, list and Allocate of the daemon, against budgets
	tests/bench/device-plugin

.PHONY: image image-check
image: $(if $(filter $(HERE),$(ARCH)),build) $(addprefix build-,$(FOREIGN)) ## OCI image, without a Docker daemon, as dist/image.tar (ARCH="amd64 arm64": for both)
	OUT=$(abspath $(BIN_DIR))/image.tar manifests/image/build $(FOLDERS)
image-check: ## run the programs of dist/image.tar in it; build it again and compare
	manifests/image/check $(BIN_DIR)/image.tar $(FOLDERS)

.PHONY: examples-image
examples-image: ## images of manifests/examples, as dist/rdma-tools.tar and dist/mpi.tar (REGISTRY=registry.example.com/rdma: and push)
	REGISTRY=$(REGISTRY) manifests/image/examples

.PHONY: picture
picture: ## docs/programs.svg, the picture of the README, from docs/programs.dot (needs graphviz)
	dot -Tsvg docs/programs.dot -o docs/programs.svg

.PHONY: pages
pages: ## manual pages and completions of the programs, into dist/pages/
	for program in rdmactl rdma-device-plugin rdma-agent; do $(CARGO) run --quiet --locked --package $$program -- pages dist/pages || exit; done
	@ls dist/pages/man1 | wc -l | sed 's/$$/ manual pages in dist\/pages\/man1\//'

.PHONY: release
# The chart and the programs are checked first, where this machine can run them.
release: image ## archives, image, chart, krew manifest, checksums, SBOM, in dist/release (ARCH="amd64 arm64", REGISTRY, RELEASE_URL)
	$(if $(filter $(HERE),$(ARCH)),$(BIN_DIR)/rdmactl pages dist/pages && $(BIN_DIR)/rdma-device-plugin pages dist/pages && $(BIN_DIR)/rdma-agent pages dist/pages)
	$(if $(filter $(HERE),$(ARCH)),$(MAKE) --no-print-directory manifests)
	REGISTRY=$(REGISTRY) RELEASE_URL=$(RELEASE_URL) OUT=$(abspath $(BIN_DIR)) manifests/release/build $(FOLDERS)

.PHONY: manifests
manifests: ## render every kustomization and check it against the Kubernetes schemas
	manifests/check
