# The entry point for all tasks; CI uses the same targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The build checks queries against .sqlx, without a database; `make generate` writes .sqlx with a real database.
export SQLX_OFFLINE := true

CARGO ?= cargo
# Always build the whole workspace: with one set of features for all targets, no dependency is built twice.
BUILD := $(CARGO) build --workspace
BIN := $(or $(CARGO_TARGET_DIR),target)/debug
# The files that `make generate` writes.
GENERATED := .sqlx crds/yaml charts/latchkey/templates/crd-*.yaml docs/openapi.json docs/openapi-administration.json docs/resources.md
# glibc settings for the server (docs/decisions/0011): malloc uses one arena and returns free memory to the system.
MALLOC := GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=131072
DENY_VERSION := 0.20.2
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/latchkey
DENY := $(TOOLS)/cargo-deny-$(DENY_VERSION)/bin/cargo-deny
AUDITABLE_VERSION := 0.7.7

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: ## Start the service locally, with Postgres, Redis, an inbox page and a provider (MANIFESTS=dir, PUBLIC_ADDR=…)
	@scripts/need cc postgres redis curl dex
	@echo "Building …"
	@$(BUILD) --bins
	@exec env $(MALLOC) setpriv --pdeathsig TERM -- $(BIN)/latchkey-dev

.PHONY: build
build: ## Build the programs (debug)
	$(BUILD) --bins

.PHONY: test
test: ## Run all tests, with a real API server, Postgres, Redis, SMTP, NGINX, provider and browser (ARGS=… for the tests)
	@scripts/need cc postgres redis nginx control-plane dex promtool chromium fonts faketime argon2 oauth2-proxy kubelogin
	@$(MAKE) --no-print-directory client tests/axe/node_modules/.package-lock.json
	@tests/interop/openid/build openid-client go-oidc
	$(BUILD) --bins
	@scripts/test $(if $(ARGS),-- $(ARGS))

CLIENT := clients/typescript

.PHONY: client
client: $(CLIENT)/node_modules/.package-lock.json ## Build the TypeScript client with its tests, and check its size
	@npm --prefix $(CLIENT) run --silent build

# Installs the packages of npm that a lock file pins.
%/node_modules/.package-lock.json: %/package-lock.json
	@scripts/need node
	npm --prefix $* ci --no-audit --no-fund
	@touch $@

.PHONY: screenshots
screenshots: ## Take pictures of every hosted page: languages, light and dark, phone and desktop (target/screenshots)
	@scripts/need cc postgres redis chromium fonts
	$(BUILD) --bins
	@exec $(BIN)/latchkey-dev screenshots

.PHONY: check
check: ## Check format, lints, dependencies and generated files, and run the tests that need no other processes
	$(CARGO) fmt --all --check
	@scripts/need cc cargo-deny=$(DENY_VERSION)
	$(DENY) --config .deny.toml check bans licenses sources
	@$(MAKE) --no-print-directory generate
	@scripts/unchanged $(GENERATED)
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) test --workspace --lib --bins $(patsubst crds/tests/%.rs,--test %,$(wildcard crds/tests/*.rs))

.PHONY: advisories
advisories: ## Check the dependencies for known vulnerabilities (needs the network)
	@scripts/need cc cargo-deny=$(DENY_VERSION)
	$(DENY) --config .deny.toml check advisories

.PHONY: generate
generate: ## Generate the CRDs (also for the chart), docs/resources.md, the sqlx metadata and the OpenAPI document
	@scripts/need cc postgres
	$(BUILD) --bin crdgen --bin latchkey-dev
	@mkdir -p crds/yaml docs
	$(BIN)/crdgen crds/yaml charts/latchkey/templates docs/resources.md
	$(BIN)/latchkey-dev sqlx
	$(BUILD) --bin latchkey-server
	@$(BIN)/latchkey-server openapi > docs/openapi.json.new && mv docs/openapi.json.new docs/openapi.json
	@$(BIN)/latchkey-server openapi --administration > docs/openapi-administration.json.new
	@mv docs/openapi-administration.json.new docs/openapi-administration.json

.PHONY: bench
bench: ## Run the benchmarks: hashing, logins, refreshes, chaos, provider outage, operator, attackers, administration, pages, OpenID Connect (ARGS=logins, ARGS='hostile --only streams')
	@scripts/need cc postgres redis control-plane dex argon2
	@# Without Keycloak, the benchmark still runs, and reports Keycloak as missing.
	@case ' $(ARGS) ' in *' openid '* | '  ') scripts/need keycloak || echo 'make bench: Keycloak cannot be obtained' >&2 ;; esac
	$(BUILD) --release --bins
	@exec env $(MALLOC) setpriv --pdeathsig TERM -- $(or $(CARGO_TARGET_DIR),target)/release/latchkey-bench $(ARGS)

.PHONY: fuzz
fuzz: ## Fuzz a parser or validator, guided by coverage (TARGET=name SECONDS=60; without TARGET: list the targets)
	@scripts/fuzz "$(TARGET)" "$(SECONDS)"

.PHONY: miri
miri: ## Run the portable argon2 kernel in Miri, which finds undefined behavior (needs rustup with a nightly toolchain)
	rustup component add --toolchain nightly miri rust-src
	$(CARGO) +nightly miri test -p argon2-simd --test vectors

.PHONY: cluster-test
cluster-test: ## Install the chart in a cluster (KUBECONFIG or CLUSTER_TOOLS=folder), and upgrade, scale and evict under load (KEYCLOAK_EXPORT=file)
	@scripts/need cc postgres redis nginx buildah control-plane dex oauth2-proxy cargo-auditable=$(AUDITABLE_VERSION)
	@PATH=$(TOOLS)/cargo-auditable-$(AUDITABLE_VERSION)/bin:$$PATH scripts/cluster-test

.PHONY: interop
interop: ## Test with third-party programs: OpenID Connect, Standard Webhooks, schemathesis (needs the network)
	@scripts/need cc postgres redis control-plane kubelogin chromium
	$(BUILD) --bins
	@tests/interop/openid/build
	@$(BIN)/latchkey-dev openid
	@scripts/test -- openid::kubectl
	@tests/interop/webhooks/run --test
	@$(BIN)/latchkey-dev webhook-recording | tests/interop/webhooks/run -
	@tests/interop/schemathesis/run

.PHONY: tools
tools: ## Install the tools that the other targets need
	@scripts/need cc postgres redis nginx curl buildah control-plane dex promtool chromium fonts faketime argon2 node python oauth2-proxy kubelogin cargo-deny=$(DENY_VERSION) cargo-auditable=$(AUDITABLE_VERSION)
