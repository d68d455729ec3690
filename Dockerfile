# Two stages: `builder` makes a virtual environment, and the image contains only that environment.
#
# The native runtime serves, so torch is not installed. For the models and dtypes that need it, TORCH is
# any version or local build in the package index (2.13.0, 2.13.0+cpu, ...);
# PIP_EXTRA_INDEX_URL names a second index, such as PyTorch's own for CPU-only builds.
# EXTRAS are those of pyproject.toml: PostgreSQL and object storage for replicas that share a store.
ARG PYTHON_VERSION=3.12
# Pins the base image: --build-arg BASE_DIGEST=@sha256:..., as `docker buildx imagetools inspect
# python:3.12-slim-bookworm` shows it. Empty, so that a build gets the tag's security updates.
ARG BASE_DIGEST=

FROM python:${PYTHON_VERSION}-slim-bookworm${BASE_DIGEST} AS builder

# Any compiler version of this Debian release works.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH=none
ARG EXTRAS=postgres,s3
ARG PIP_EXTRA_INDEX_URL=
# The constraints apply to the build environment of the extension, too.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_CONSTRAINT=/src/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt

WORKDIR /src
COPY constraints.txt pyproject.toml ./
COPY deploy/requirements ./deploy/
# The dependencies have a layer of their own: they are most of the image and change the least.
RUN python -m venv --without-pip /opt/everstream \
    && if [ "${TORCH}" != none ]; then \
        sed -i "s/^torch==.*/torch==${TORCH}/" constraints.txt && EXTRAS="${EXTRAS},torch"; \
    fi \
    && deploy/requirements "${EXTRAS}" > requirements.txt \
    && pip --python /opt/everstream install --requirement requirements.txt

COPY README.md LICENSE ./
COPY server ./server
COPY model ./model
COPY clients ./clients
# With the base of the bundled chat model, by version and hash, where no volume hides it.
RUN EVERSTREAM_REQUIRE_NATIVE=1 pip --python /opt/everstream install --no-deps . \
    && HF_ASSETS_CACHE=/opt/everstream/assets python -m model.hub.base model/bundled/smollm2


FROM python:${PYTHON_VERSION}-slim-bookworm${BASE_DIGEST}

RUN useradd --system --uid 10001 --user-group --home-dir /nonexistent --no-create-home \
    --shell /usr/sbin/nologin everstream \
    && install --directory --owner=10001 --group=10001 --mode=0700 \
        /var/lib/everstream /var/cache/everstream
COPY --from=builder /opt/everstream /opt/everstream

ENV PATH=/opt/everstream/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVERSTREAM_HOST=0.0.0.0 \
    EVERSTREAM_PORT=8000 \
    EVERSTREAM_STORE=/var/lib/everstream \
    EVERSTREAM_MODEL=smollm2 \
    HF_HOME=/var/cache/everstream \
    HF_ASSETS_CACHE=/opt/everstream/assets

VOLUME /var/lib/everstream
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['EVERSTREAM_PORT']}/health\", timeout=4)"]

ENTRYPOINT ["everstream"]
CMD ["serve"]
