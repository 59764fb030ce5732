"""Everything beyond the core: faster kernels, more formats, logits processors, speculative decoding, tensor
parallelism, the server and the command line. It plugs into the core through `tinyvllm.engine.Parts`: see llm.py."""
