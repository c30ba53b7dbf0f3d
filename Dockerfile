# An image with the command `stretto`:
#
#   docker build -t stretto .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" --user "$(id -u):$(id -g)" stretto train run.toml
#
# `--ipc host`, because NCCL shares memory between the ranks of a machine, and Docker gives a container 64 MB of it.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# Any version from 2.10 on. First and in a layer of its own: it is large, and changes less often than stretto does.
ARG TORCH=2.15.0
RUN pip install --no-cache-dir "torch==${TORCH}"
RUN --mount=type=bind,from=build,source=/dist,target=/dist pip install --no-cache-dir /dist/*.whl

# Runs write into the folder they are started in. HOME is writable for any user, as `--user` may name one without a home.
RUN useradd --create-home --uid 1000 stretto && mkdir /work && chown stretto:stretto /work && chmod 1777 /home/stretto
ENV HOME=/home/stretto PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["stretto"]
CMD ["--help"]
