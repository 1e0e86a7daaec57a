"""`python -m pipelines.train CONFIG …`: training in this process, in those of torchrun, or on Ray.

torchrun --nproc-per-node 8 -m -- pipelines.train CONFIG               one of several processes
python -m pipelines.train CONFIG --executor.kind ray                   workers of a Ray cluster, also by `ray job submit`
python -m pipelines.train CONFIG                                       one process, as `retro train CONFIG`

The `--` stops torchrun from reading options that begin like its own, for example `--run`.
"""

import sys

from pipelines.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
