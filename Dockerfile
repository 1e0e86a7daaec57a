# An image with the command `retro` that serves /srv/datastore (docs/how-to/serving/deploy.md).
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# PyTorch for CPUs. pip prefers 2.13.0+cpu of this index to 2.13.0 of the package index, which is built for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of pyproject.toml, separated by commas: minilm,s3
ARG EXTRAS=
ENV PATH=/opt/retro/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /src
# The packages have their own layer, which changes only with pyproject.toml.
COPY pyproject.toml README.md LICENSE ./
# hadolint ignore=DL3013
RUN python -m venv /opt/retro && pip install --extra-index-url "$TORCH_INDEX" ".${EXTRAS:+[$EXTRAS]}"
COPY indexing indexing
COPY pipelines pipelines
COPY retro retro
# hadolint ignore=DL3013
RUN pip install --no-deps --force-reinstall .

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/retro /opt/retro
ENV PATH=/opt/retro/bin:$PATH
# Loops of searches and generation, compiled for the processor of this machine, so that no server compiles them at its start.
ENV NUMBA_CACHE_DIR=/opt/retro/compiled
RUN python -m pipelines.compile_ahead
RUN useradd --uid 10001 --no-create-home retro
USER 10001
EXPOSE 8080
HEALTHCHECK --start-period=5m --timeout=5s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["retro"]
CMD ["serve", "/srv/datastore", "--host", "0.0.0.0"]
