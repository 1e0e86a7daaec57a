"""`python -m pipelines.train CONFIG …`: training by this process, by torchrun's, or by Ray's.

torchrun --nproc-per-node 8 -m -- pipelines.train CONFIG               each process is one of many
python -m pipelines.train CONFIG --executor.kind ray                   workers of a Ray cluster, also by `ray job submit`
python -m pipelines.train CONFIG                                       alone, as `retro train CONFIG`

Without `--`, torchrun takes options that begin like its own, `--run` for example, for its own.
"""

import sys

from pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
