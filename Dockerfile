# flexcp on top of an image that has torch >= 2.11 for your GPUs. Loops are compiled at build time, so the first plan of a job takes milliseconds.
#   docker build -t flexcp . && docker run --rm --gpus all flexcp doctor
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime
FROM ${BASE}
WORKDIR /opt/flexcp
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# What compiled loops are kept in must be readable by whoever runs the image.
ENV NUMBA_CACHE_DIR=/opt/flexcp/compiled
RUN pip install --no-cache-dir . && flexcp warmup && chmod -R a+rX,go-w /opt/flexcp/compiled
ENTRYPOINT ["flexcp"]
CMD ["doctor"]
