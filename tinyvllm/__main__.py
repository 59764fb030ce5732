"""`python -m tinyvllm`: the command line, which is kept beside the engine in examples/tinyvllm_cli."""
import sys

from tinyvllm_cli import main

sys.exit(main())
