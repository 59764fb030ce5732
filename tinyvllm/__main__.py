"""`python -m tinyvllm`: the command line, which is kept beside the engine in examples/tinyvllm_extra.cli."""
import sys

from tinyvllm_extra.cli import main

sys.exit(main())
