# The server, `retro serve`. docs/how-to/serving/deploy.md shows how to run it; compose.yaml runs it with limits.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS build
# https://download.pytorch.org/whl/cu130 holds PyTorch for NVIDIA GPUs; the index of another CUDA version has its number.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of pyproject.toml, separated by commas, e.g. minilm,s3
ARG EXTRAS=
ENV PATH=/opt/retro/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/retro
WORKDIR /src
# Packages first: this layer is built again only if pyproject.toml changes. A version with a local part, such as 2.13.0+cpu,
# precedes the same version of the package index.
COPY pyproject.toml README.md LICENSE ./
RUN pip install --extra-index-url "$TORCH_INDEX" ".${EXTRAS:+[$EXTRAS]}"
COPY indexing indexing
COPY pipelines pipelines
COPY retro retro
RUN pip install --no-deps --force-reinstall .

FROM python:${PYTHON}-slim-bookworm
# libgomp1: faiss-cpu? 
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin retro
COPY --from=build /opt/retro /opt/retro
ENV PATH=/opt/retro/bin:$PATH PYTHONUNBUFFERED=1
USER retro
WORKDIR /srv
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=2m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["retro"]
CMD ["serve", "/srv/datastore", "--host", "0.0.0.0"]
