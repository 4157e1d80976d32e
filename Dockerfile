# One image, two commands: `python -m worker` (the default) and `python -m gateway`.
FROM python:3.11-slim

# The CPU's kernels are compiled on first use.
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /app

# torch alone and first: the largest layer changes least. Point TORCH_INDEX at the index of CPU builds where there is
# no GPU: it saves gigabytes.
ARG TORCH_INDEX=
ARG TORCH_TRUSTED_HOST=
COPY constraints.txt ./
RUN pip install -c constraints.txt torch \
    ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} ${TORCH_TRUSTED_HOST:+--trusted-host $TORCH_TRUSTED_HOST}

# Then what pyproject.toml asks for, so that a change of our code reinstalls nothing.
COPY pyproject.toml README.md ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt
COPY headrace headrace
COPY worker worker
COPY gateway gateway
COPY kernels kernels
RUN pip install --no-deps .

# Not root; models and compiled kernels are kept in a volume.
RUN useradd --create-home --uid 10001 headrace && install -d -o headrace /cache
USER headrace
ENV HEADRACE_CACHE_DIR=/cache HEADRACE_LOG_FORMAT=json HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache TQDM_DISABLE=1
VOLUME /cache
CMD ["python", "-m", "worker"]
