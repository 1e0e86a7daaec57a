"""`python -m pipelines.index CONFIG …`: `retro index` as a module, for
`ray job submit -- python -m pipelines.index CONFIG`."""

import sys

from pipelines.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["index", *sys.argv[1:]]))
