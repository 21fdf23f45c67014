# hone in a container. CPU by default; for an NVIDIA GPU: docker build --build-arg DEVICE=cuda .
# docs/docker.md shows how to run it.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG DEVICE=cpu

# --- everything is installed into /opt/hone, by hash ---
FROM ${PYTHON_IMAGE} AS builder
ARG DEVICE
WORKDIR /src
RUN python -m venv /opt/hone
COPY requirements/runtime.in requirements/runtime.txt requirements/runtime-cuda.txt requirements/
RUN case "$DEVICE" in \
      cpu) lock=requirements/runtime.txt ;; \
      cuda) lock=requirements/runtime-cuda.txt ;; \
      *) echo "DEVICE: expected cpu or cuda, found '$DEVICE'" >&2; exit 1 ;; \
    esac; \
    /opt/hone/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r "$lock"
COPY pyproject.toml README.md ./
COPY server/ server/
RUN /opt/hone/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .

# --- what differs between devices ---
FROM ${PYTHON_IMAGE} AS runtime-cpu

# CUDA's and cuDNN's libraries come from the lock, not from the image, so that both are of the versions that the engine
# was built against; the driver comes from the host, through NVIDIA's container toolkit.
FROM ${PYTHON_IMAGE} AS runtime-cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/opt/hone/lib/python3.11/site-packages/nvidia/cu13/lib:/opt/hone/lib/python3.11/site-packages/nvidia/cudnn/lib

FROM runtime-${DEVICE}
# Tuning compiles on the machine that serves; without a compiler models would stay on ONNX Runtime.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 hone \
    && useradd --uid 10001 --gid hone --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin hone \
    && mkdir /models /kernels_cache \
    && chown hone:hone /kernels_cache \
    && chmod 0700 /kernels_cache
COPY --from=builder /opt/hone /opt/hone
ENV PATH=/opt/hone/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HONE_HTTP_ADDRESS=0.0.0.0 \
    HONE_GRPC_ADDRESS=0.0.0.0 \
    HONE_METRICS_ADDRESS=0.0.0.0 \
    HONE_KERNELS_CACHE=/kernels_cache
USER 10001:10001
VOLUME ["/models", "/kernels_cache"]
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# Asks where HONE_HTTP_PORT says; a server told its port in another way needs a health check of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/opt/hone/bin/python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('HONE_HTTP_PORT', '8000') + '/v2/health/ready', timeout=4)"]
ENTRYPOINT ["/opt/hone/bin/hone"]
CMD ["serve", "--model-repository", "/models", "--model-control-mode", "poll"]
