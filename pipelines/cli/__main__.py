"""`python -m pipelines.cli VERB …`: `retro VERB …` as a module."""

import sys

from pipelines.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
