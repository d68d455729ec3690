# Two stages: `builder` makes a virtual environment, the image gets that environment and nothing else.
#
# TORCH is any version or local build of torch that the package index has (2.13.0, 2.13.0+cpu, ...);
# PIP_EXTRA_INDEX_URL names a second index, such as PyTorch's own for CPU-only builds.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS builder

ARG TORCH=2.13.0
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PATH=/opt/everstream/bin:${PATH}

WORKDIR /src
COPY constraints.txt ./
# torch has a layer of its own: it is most of the image and changes the least.
RUN python -m venv /opt/everstream \
    && sed -i "s/^torch==.*/torch==${TORCH}/" constraints.txt \
    && pip install --constraint constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY server ./server
COPY model ./model
COPY clients ./clients
RUN pip install --constraint constraints.txt .


FROM python:${PYTHON_VERSION}-slim-bookworm

RUN useradd --system --uid 10001 --user-group --home-dir /nonexistent --no-create-home \
    --shell /usr/sbin/nologin everstream
COPY --from=builder /opt/everstream /opt/everstream

ENV PATH=/opt/everstream/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVERSTREAM_HOST=0.0.0.0 \
    EVERSTREAM_PORT=8000

WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ['EVERSTREAM_PORT']}/health\", timeout=4)"]

ENTRYPOINT ["everstream"]
CMD ["serve"]
