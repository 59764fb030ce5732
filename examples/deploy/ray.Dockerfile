# docker build -f examples/deploy/ray.Dockerfile -t IMAGE .      in a checkout of this repository
FROM rayproject/ray:2.60.0-py311-gpu
COPY --chown=ray . /home/ray/tinyvllm
RUN pip install --no-cache-dir '/home/ray/tinyvllm[ray]'
# The module of the application, the device, and what ray_serve.py sets where it starts Ray itself; HAProxy: README.md
ENV PYTHONPATH=/home/ray/tinyvllm/examples/deploy DEV=CUDA \
    RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=2147483647 RAY_worker_niceness=0
