"""`python -m tinyvllm`: the command line, which is part of the extension."""
import sys

from . import extension

if __name__ == "__main__": sys.exit(extension("cli").main())
