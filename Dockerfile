# syntax=docker/dockerfile:1
# The worker (and every other `chairlift` command). With CUDA:
#   docker build -t chairlift:cuda .
#   docker run --gpus all -v chairlift:/cache -e CHAIRLIFT_REDIS_URL=redis://host:6379 chairlift:cuda worker --model ...
# For a CPU:
#   docker build -t chairlift:cpu --build-arg TORCH=cpu .
# That is the ordinary torch, which brings CUDA along all the same. A torch built without it makes the image a third
# of the size: name a package index that has such builds with --build-arg TORCH_CPU_INDEX=...

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=cuda
ARG TORCH_CPU_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1
WORKDIR /src
RUN python -m venv /opt/chairlift
ENV PATH=/opt/chairlift/bin:$PATH
# The large and slow part first, so that a change of our own code does not repeat it.
COPY constraints.txt ./
RUN case "${TORCH}" in \
      cuda) pip install torch --constraint constraints.txt ;; \
      cpu) pip install torch --constraint constraints.txt ${TORCH_CPU_INDEX:+--index-url "${TORCH_CPU_INDEX}"} ;; \
      *) echo "TORCH is '${TORCH}', should be cuda or cpu" >&2; exit 1 ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
COPY api_client ./api_client
COPY kernels ./kernels
COPY worker ./worker
RUN pip install '.[worker]' --constraint constraints.txt

FROM python:${PYTHON}-slim-bookworm
# Triton compiles a small launcher for each kernel on the machine that it runs on: that takes a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home chairlift \
    && install --directory --owner chairlift /cache
COPY --from=build /opt/chairlift /opt/chairlift
ENV PATH=/opt/chairlift/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache
USER 10001
VOLUME /cache
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 CMD ["python", "-m", "chairlift_worker.health"]
ENTRYPOINT ["chairlift"]
CMD ["worker"]
