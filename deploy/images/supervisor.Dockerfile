# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# Sensor, controller, actuator and host daemon: no torch, no compiler, no root.
#
#   docker build -f deploy/images/supervisor.Dockerfile -t REGISTRY/resiliency-supervisor:0.1.0 .
#
# The base is a tag, which gets the distribution's security updates with each build.  For a build that gives the same
# image each time, name it by its digest, which a registry knows and this file cannot without growing old:
#   docker buildx imagetools inspect python:3.11.13-slim-bookworm; docker build --build-arg BASE=python@sha256:... ...
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY . .
RUN deploy/images/install /opt/venv supervisor watchdogs kubernetes

FROM ${BASE}
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The chart runs the daemon as root, because its directory on the node is root's.
USER 65532:65532
WORKDIR /tmp
# Each program ends by SIGTERM, with 0; streams are closed, and nothing in a job notices.
STOPSIGNAL SIGTERM
# Of whichever part runs in it.
ENV RESILIENCY_ALIVE_FILE=/tmp/alive
HEALTHCHECK --interval=20s --timeout=10s --start-period=30s CMD ["sh", "-c", "test -n \"$(find \"$RESILIENCY_ALIVE_FILE\" -mmin -1)\""]
# The chart names the part: python3 -m supervisor.sensor, .controller, .actuator, .host_daemon.
CMD ["python3", "-m", "supervisor", "--all-in-one"]
