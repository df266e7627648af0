# docker build -t caden . && docker run --rm caden            trains on the embedded data
# docker run --rm caden make test                             runs the suite
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends make git && rm -rf /var/lib/apt/lists/*
# The CPU build of PyTorch is a fifth of the default one: pass its index with --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
WORKDIR /caden
COPY . .
RUN make .venv/installed
CMD ["make", "run"]
