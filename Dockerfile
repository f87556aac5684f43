# Two images from one file: `api` (no torch) and `worker` (with it).
#   docker build --target api .      docker build --target worker .
# Dependencies are layers of their own, below the code, so that a changed line of ours rebuilds in seconds.

ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PATH=/opt/kronoscope/bin:$PATH
# the data folders belong to the user, and named volumes take that over when they are first mounted
RUN groupadd --gid 10001 kronoscope \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin kronoscope \
    && mkdir -p /data/artifacts /data/models \
    && chown -R kronoscope:kronoscope /data \
    # jobs run as other users of the same group
    && chmod 0775 /data/artifacts /data/models \
    && python -m venv /opt/kronoscope
WORKDIR /app
# what builds a wheel wants these files; an empty package stands in until the code comes
COPY pyproject.toml hatch_build.py constraints.txt LICENSE ./
COPY ops/locks ops/locks
RUN mkdir catalog && touch README.md catalog/__init__.py \
    && pip install --require-hashes --no-deps -r ops/locks/build.txt

# --- dependencies --------------------------------------------------------------------------------------------------
# file by file as ops/locks has them (`make lock`); --no-index refuses what a lock lacks

FROM base AS api-dependencies
RUN pip install --require-hashes --no-deps -r ops/locks/api.txt \
    && pip install --no-index --no-build-isolation '.[api]' && pip uninstall -y kronoscope

FROM base AS worker-dependencies
# `--build-arg PIP_EXTRA_INDEX_URL=…` takes torch from an index with smaller CPU builds
ARG PIP_EXTRA_INDEX_URL
# torch's builds differ from machine to machine, and so do their hashes: it is pinned by its version
RUN pip install --require-hashes --no-deps -r ops/locks/worker.txt \
    && pip install -c constraints.txt torch \
    && pip install --no-index --no-build-isolation '.[worker]' && pip uninstall -y kronoscope

# --- code ----------------------------------------------------------------------------------------------------------

FROM api-dependencies AS api
COPY README.md ./
COPY migrations migrations
COPY catalog catalog
COPY jobs jobs
COPY kronoscope kronoscope
COPY api api
RUN pip install --no-deps --no-build-isolation --editable . && python -m compileall -q .
USER 10001:10001
WORKDIR /data
ENV HOME=/tmp \
    KRONOSCOPE_ARTIFACTS=/data/artifacts \
    KRONOSCOPE_MODEL_STORE=/data/models \
    KRONOSCOPE_HOST=0.0.0.0
EXPOSE 8000
CMD ["python", "-P", "-m", "api"]

FROM worker-dependencies AS worker
COPY README.md ./
COPY migrations migrations
COPY catalog catalog
COPY jobs jobs
COPY engine engine
COPY worker worker
RUN pip install --no-deps --no-build-isolation --editable . && python -m compileall -q .
USER 10001:10001
WORKDIR /data
ENV HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    KRONOSCOPE_PULSE=/tmp/kronoscope.pulse \
    KRONOSCOPE_ARTIFACTS=/data/artifacts \
    KRONOSCOPE_MODEL_STORE=/data/models
CMD ["celery", "--app", "worker.app", "worker", "--pool", "threads", "--loglevel", "info"]
