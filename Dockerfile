# The images: targets `engine-cpu`, `engine-gpu` (also has the compiler that Triton needs for its launcher), `grammar` and
# `gateway`. `make images` builds all of them, and compose.yaml builds those that no registry has.
#
# The final stages have no package index, no sources and no root, and run with a read-only root filesystem. BASE is any image
# with Python 3.11 or newer as `python`, venv, pip and, unless it has gcc, apt. Build arguments with pip's own names, or a
# pip.conf in BASE, set the package index.
#
# locks/ has every version with its hashes. torch is the CPU build of PyTorch's index, or of the index that pip is configured
# with; TORCH=cuda takes PyPI's build, which is large, by its hash. LOCKED=off takes the newest versions that pyproject.toml
# allows. An image lists its components in /opt/lockstep/sbom.cdx.json.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS tools
RUN command -v gcc >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
RUN python -m venv /opt/lockstep && python -m venv /opt/supply
ENV PATH=/opt/lockstep/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    LOCKED_INSTALL="install --no-deps --require-hashes --only-binary :all:"
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /build
COPY pyproject.toml ./
COPY tools/torch_index.py tools/
COPY locks locks
RUN --mount=type=cache,target=/root/.cache/pip /opt/supply/bin/pip ${LOCKED_INSTALL} -r locks/supply.txt

# Both distributions, for all images.
FROM tools AS wheels
COPY . .
RUN /opt/supply/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . ./client

# In the next three stages dependencies are a layer of their own, which is built again when a lock changes, but not when the
# code does.
FROM tools AS build-engine
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG LOCKED=on
ARG TORCH=torch
RUN --mount=type=cache,target=/root/.cache/pip \
    { [ "${LOCKED}" = off ] || pip ${LOCKED_INSTALL} -r locks/engine.txt; } \
    && if [ "${TORCH}" = cuda ]; then pip ${LOCKED_INSTALL} -r locks/cuda.txt; \
    else pip install $(python tools/torch_index.py) -r "locks/${TORCH}.txt"; fi \
    && pip ${LOCKED_INSTALL} -r locks/embedded.txt
COPY --from=wheels /dist /dist
RUN if [ "${LOCKED}" = off ]; then pip install /dist/lockstep_client*.whl "$(echo /dist/lockstep_engine*.whl)[engine,embedded,http,receipts,vllm-wire]"; \
    else pip install --no-deps --no-index /dist/*.whl; fi \
    && /opt/supply/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/lockstep/sbom.cdx.json /opt/lockstep/bin/python

FROM tools AS build-grammar
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG LOCKED=on
ARG TORCH=torch
ARG GRAMMAR_BACKEND=llguidance
RUN case "${GRAMMAR_BACKEND}" in llguidance | xgrammar) ;; \
    *) echo "GRAMMAR_BACKEND: '${GRAMMAR_BACKEND}' is not llguidance or xgrammar" >&2; exit 1 ;; esac
RUN --mount=type=cache,target=/root/.cache/pip \
    { [ "${LOCKED}" = off ] || pip ${LOCKED_INSTALL} -r "locks/grammar-${GRAMMAR_BACKEND}.txt"; } \
    && { [ "${GRAMMAR_BACKEND}" != xgrammar ] || pip install $(python tools/torch_index.py) -r "locks/${TORCH}.txt"; }
COPY --from=wheels /dist /dist
RUN if [ "${LOCKED}" = off ]; then pip install /dist/lockstep_client*.whl "$(echo /dist/lockstep_engine*.whl)[${GRAMMAR_BACKEND}]"; \
    else pip install --no-deps --no-index /dist/*.whl; fi \
    && /opt/supply/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/lockstep/sbom.cdx.json /opt/lockstep/bin/python
# A dependency that pulls torch into the small image fails the build here.
RUN [ "${GRAMMAR_BACKEND}" = xgrammar ] \
    || python -c "import importlib.util, sys; sys.exit('torch is installed' if importlib.util.find_spec('torch') else 0)"

FROM tools AS build-gateway
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG LOCKED=on
RUN --mount=type=cache,target=/root/.cache/pip \
    [ "${LOCKED}" = off ] || pip ${LOCKED_INSTALL} -r locks/gateway.txt
COPY --from=wheels /dist /dist
RUN if [ "${LOCKED}" = off ]; then pip install /dist/lockstep_client*.whl "$(echo /dist/lockstep_engine*.whl)[http]"; \
    else pip install --no-deps --no-index /dist/*.whl; fi \
    && /opt/supply/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/lockstep/sbom.cdx.json /opt/lockstep/bin/python

FROM ${BASE} AS final
ARG UID=10001
RUN useradd --uid "${UID}" --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lockstep \
    && install -d -m 0700 -o "${UID}" -g "${UID}" /run/lockstep /var/cache/lockstep
ENV PATH=/opt/lockstep/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    LOCKSTEP_GRAMMAR_DIR=/run/lockstep
LABEL org.opencontainers.image.vendor="The Lockstep authors" \
    org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp

FROM final AS gateway
LABEL org.opencontainers.image.title="Lockstep gateway" \
    org.opencontainers.image.description="OpenAI's and Anthropic's HTTP API in front of Lockstep engines"
COPY --from=build-gateway /opt/lockstep /opt/lockstep
ENV LOCKSTEP_GATEWAY_LISTEN=0.0.0.0:8000
EXPOSE 8000
ARG UID=10001
USER ${UID}:${UID}
ENTRYPOINT ["python", "-m", "http_gateway"]

FROM final AS grammar
LABEL org.opencontainers.image.title="Lockstep grammar process" \
    org.opencontainers.image.description="Grammar matchers that write masks into memory shared with a Lockstep engine"
COPY --from=build-grammar /opt/lockstep /opt/lockstep
ARG GRAMMAR_BACKEND=llguidance
ENV LOCKSTEP_GRAMMAR_BACKEND=${GRAMMAR_BACKEND}
ARG UID=10001
USER ${UID}:${UID}
ENTRYPOINT ["python", "-m", "grammar_service"]

FROM final AS engine-cpu
LABEL org.opencontainers.image.title="Lockstep engine" \
    org.opencontainers.image.description="Guided and speculative decoding of language models, over gRPC"
COPY --from=build-engine /opt/lockstep /opt/lockstep
ENV HF_HUB_OFFLINE=1 \
    TRITON_CACHE_DIR=/var/cache/lockstep/triton \
    LOCKSTEP_CACHE=/var/cache/lockstep \
    HF_HOME=/var/cache/lockstep/huggingface \
    LOCKSTEP_LISTEN=0.0.0.0:50051 \
    LOCKSTEP_HEALTH_LISTEN=unix:/tmp/health.sock \
    LOCKSTEP_GRAMMAR=connect
EXPOSE 50051
ARG UID=10001
USER ${UID}:${UID}
ENTRYPOINT ["python", "-m", "gpu_engine"]
CMD ["serve"]

FROM engine-cpu AS engine-gpu
USER 0:0
RUN command -v gcc >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
ARG UID=10001
USER ${UID}:${UID}
