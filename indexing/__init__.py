"""Layer 1: from text to a datastore and its neighbors; plain functions of one shard (never ray, retro, pipelines)."""

from indexing.machine import choose_blas_kernels

choose_blas_kernels()
