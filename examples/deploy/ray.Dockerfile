# In a checkout of this repository:   docker build -f examples/deploy/ray.Dockerfile -t IMAGE .
FROM rayproject/ray:2.60.0-py311-gpu
COPY --chown=ray . /home/ray/tinyvllm
RUN pip install --no-cache-dir '/home/ray/tinyvllm[ray]'
# Path of ray_serve, the device, HAProxy (see README.md), and the variables that ray_serve.py sets when it starts Ray
ENV PYTHONPATH=/home/ray/tinyvllm/examples/deploy DEV=CUDA \
    RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=2147483647 RAY_worker_niceness=0
