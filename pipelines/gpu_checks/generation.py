"""Cached decoding on one GPU: tokens/s, and whether its logits equal those of a full forward pass."""

import numpy as np
import torch

from pipelines.gpu_checks.part import Finding, Job, distance
from pipelines.gpu_checks.training import K, sized
from retro.inference.decoder import Decoder
from retro.inference.rows import RetrieveNeighbors, Row
from retro.model.retro import Retro


def run(job: Job) -> list[Finding]:
    """Decode with random neighbors, one row and many."""
    settings, _, _ = sized("172m", 1, job)
    placement, m = job.placement, settings.chunk_length
    torch.manual_seed(0)
    model = Retro(settings).to(placement.device).eval()
    placement.cast(model)

    def retrieve(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.concatenate((chunks, chunks[:, ::-1]), axis=1)  # [n, 2m], made of the chunk alone
        return np.repeat(tokens[:, None], K, axis=1), np.full((len(chunks), K), 2 * m)

    found, steps = [_equality(model, job, retrieve)], 2 * m + 1
    for rows in (1, 8, 64):
        decoder = Decoder(model, placement, 8 * m)
        texts = [decoder.add(np.arange(m) % settings.vocab_size, retrieve) for _ in range(rows)]
        decoder.read(texts)

        def decode(decoder: Decoder = decoder, texts: list[Row] = texts) -> None:
            for _ in range(steps):
                for text in texts:
                    decoder.append(text, 1)
                decoder.read(texts)

        found.append(Finding(f"tokens/s, {rows} rows", f"{rows * steps / job.seconds(decode):,.0f}"))
    return found


@torch.inference_mode()
def _equality(model: Retro, job: Job, retrieve: RetrieveNeighbors) -> Finding:
    """Distance of the logits after a prompt and some single tokens from those of one pass over all of them."""
    placement, m = job.placement, model.settings.chunk_length
    tokens = np.random.default_rng(0).integers(1, model.settings.vocab_size, 3 * m + 5)
    decoder = Decoder(model, placement, 8 * m)
    row = decoder.add(tokens[: 2 * m + 1], retrieve)
    logits = decoder.read([row])
    for token in tokens[2 * m + 1 :]:
        decoder.append(row, int(token))
        logits = decoder.read([row])
    neighbors, lengths = retrieve(tokens[: 3 * m].reshape(3, m))
    inputs = {"tokens": tokens[None], "neighbors": neighbors[None], "neighbor_lengths": lengths[None]}
    with placement.autocast():
        expected = model(**placement.put({name: torch.from_numpy(each) for name, each in inputs.items()}))[0, -1]
    apart = distance(logits[0], expected)
    limit = 1e-3 if placement.dtype == torch.float32 else 5e-2
    return Finding("logits with and without the cache, relative distance", f"{apart:.1e}", apart < limit)
