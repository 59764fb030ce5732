"""Everything beyond the core: faster kernels, more formats, logits processors, speculative decoding, tensor
parallelism, the server and the command line. tinyvllm imports it lazily, through `tinyvllm.config.extension`."""
