# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# Launcher, checkpoint engine, NeMo and Megatron, benchmark, simulator; also the rendezvous store.
#
#   docker build -f deploy/images/workload.Dockerfile -t REGISTRY/resiliency-workload:0.1.0 .
#   docker build ... --build-arg EXTRAS="launch checkpoint" for plain torch programs: a third of the size
#
# The base is a tag, or a digest with --build-arg BASE=python@sha256:..., as for supervisor.Dockerfile.
# torch's wheels bring CUDA's libraries; the node brings the driver.  To build on an image that has torch already,
# run `deploy/images/install` there with an environment made with --system-site-packages.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS="nemo watchdogs"
# Megatron compiles its index helpers.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN deploy/images/install /opt/venv ${EXTRAS} && /opt/venv/bin/pip install --no-cache-dir . --constraint constraints.txt

FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
COPY launcher.py /opt/resiliency/
COPY benchmark /opt/resiliency/benchmark
COPY examples /opt/resiliency/examples
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /opt/resiliency
# The launcher is the first process: SIGTERM reaches it, ranks stop at one step, save it and exit with 0.
STOPSIGNAL SIGTERM
# It watches its ranks itself, and restarts them in milliseconds: a second watchman would only kill what recovers.
# The rendezvous store, which is started from this image too, is looked at by its port, with --health-cmd or the chart.
HEALTHCHECK NONE
ENTRYPOINT ["python3", "/opt/resiliency/launcher.py"]
CMD ["--help"]
