"""Settings of training: steps, optimizer, schedule, device, evaluation and checkpoints."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from indexing.machine import Precision
from indexing.store.settings import Fraction, PositiveFraction, settings
from retro.adapters.settings import Weights

OnNan = Literal["stop", "skip"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
Optimizer = Literal["auto", "adamw", "muon"]

_SMALL = ("tiny", "small", "base-cpu")
"""Presets whose recipe is not the paper's (docs/results/recipe.md)."""
_DEFAULTS = {
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95},
    "muon": {"lr": 3e-2, "beta1": 0.5, "beta2": 0.99},
}
"""Of settings that depend on the optimizer."""
_WARMUP = (20, 100)
"""Fewest and most steps of a warm-up that is not set. With a shorter one the first updates of embeddings are large."""


@settings
class TrainSettings:
    """Length, optimizer and logging of a training run."""

    steps: PositiveInt = 1000
    """Optimizer steps of the whole run. A run can be extended if the finished steps keep their learning rates: with
    `constant`, and with `wsd` before it decays."""
    batch_size: PositiveInt = 8
    """Sequences of one forward pass."""
    gradient_accumulation_steps: PositiveInt = 1
    """Batches of one optimizer step. Each has its own forward and backward pass; the loss is the mean over all
    labels."""
    optimizer: Optimizer = "auto"
    """`adamw` (paper), or `muon`: orthogonal updates for the matrices of layers, and AdamW for embeddings, output
    layer, norms, gates, relative positions and adapters. `auto` is `muon` for new models of the presets `tiny`, `small`
    and `base-cpu`, else `adamw`."""
    muon_lr: PositiveFloat = 0.05
    """Peak learning rate of matrices with `muon`: the largest singular value of an update is about this times
    sqrt(outputs / inputs), at least this. It follows the schedule of `lr`, and does not depend on the width."""
    muon_momentum: Fraction = 0.9
    """Momentum of matrices with `muon`: 0.95 is usual, and models learn more with 0.9 in runs of a few hundred steps
    (docs/results/recipe.md)."""
    lr: PositiveFloat | None = None
    """Peak learning rate of AdamW (paper: 2e-4 for the sizes from 172M to 1.5B). Default: 1e-3, with `muon` 3e-2 for
    the parameters that are not its own."""
    min_lr_ratio: Fraction = 0.1
    """Last learning rate as a fraction of the peak."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up from 1e-7 (paper: 750). Default: a tenth of `steps`, at least 20 and at most 100, and never
    more than a fifth; set it if you may extend the run. More than `steps` is a tenth of them, with a warning."""
    lr_schedule: Schedule = "cosine"
    """After the warm-up: `cosine`, `linear`, `constant`, or `wsd` (constant, then a linear decay). A `constant` run can
    be continued as `wsd`."""
    decay_ratio: PositiveFraction = 0.2
    """Fraction of the steps in which `wsd` decays, the last ones."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay (paper: 0.1), for matrices and embeddings: a step multiplies them by 1 - `lr` x `weight_decay`, with
    `muon` too. Gains, biases and vectors of heads do not decay."""
    beta1: Fraction | None = None
    """AdamW's beta of the first moment. Default: 0.9 (paper), with `muon` 0.5."""
    beta2: Fraction | None = None
    """AdamW's beta of the second moment. Default: 0.95 (paper), with `muon` 0.99."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the norm of the gradient to this value; 0 = no clipping."""
    seed: int = 0
    """Seed of the initial weights and of dropout."""
    init_from: str = ""
    """Initial weights: a checkpoint, `RUN`, `RUN@best` or an exported file; empty = random weights. It may lack the
    encoder and cross-attention, or have them although this model has none."""
    weights: Weights = "all"
    """Weights of the model to train: `all`; `retrieval`, encoder, chunked cross-attention and copying from neighbors of
    a frozen decoder (RETROfit, section 4.3 of the paper); `none`, only an adapter (`lora.rank`) or a prefix
    (`model.attention.prefix_tokens`)."""
    precision: Precision = "auto"
    """Precision of matrix products; weights stay float32. `auto`: bfloat16 if the device is faster with it, else
    float32; a CPU is measured once. `tf32`: TensorFloat-32, NVIDIA GPUs since Ampere. `float16` uses dynamic loss scaling."""
    on_nan: OnNan = "stop"
    """If loss or gradient are not finite: `stop` before the update and save a checkpoint, or `skip` the batch and
    continue. In both cases `bad_batches/` in the run's folder names the samples, chunks and documents."""
    monitor_every: NonNegativeInt = 50
    """Log gradient norm, update ratio, overflow and underflow of each layer group every n steps, and in steps 1, 2, 4,
    8 … of the beginning; 0 = never. Loss and gradient norm are watched in every step. The monitor warns of signs of
    divergence."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1` …"""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile the model with `torch.compile`: `yes`, `no`, or `auto`. `auto` compiles on CUDA, and on a CPU with a C++
    compiler in runs that take long (1e15 FLOPs and more). On a CPU compilation takes one to four minutes, then steps
    are 10% to 25% faster."""
    num_workers: Annotated[int, Field(ge=-1)] = -1
    """Processes that prepare batches ahead of time; 0 = in the training process; -1 = 2 on CUDA, else 0."""
    eval_every: NonNegativeInt = 500
    """Steps between held-out evaluations, retrieval ON and OFF; 0 = at the end only."""
    eval_tokens: NonNegativeInt = 100_000
    """Tokens of each evaluation set that are scored during training; 0 = all."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints. The last step, a new best evaluation and SIGTERM save one too."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the best one (`RUN@best`)."""
    log_every: PositiveInt = 10
    """Steps between lines of `metrics.jsonl`. `loss` and `tokens_per_second` are means over these steps."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Additional places for metrics: `tensorboard`, `wandb` (without a network: WANDB_MODE=offline)."""

    @property
    def peak_lr(self) -> float:
        """`lr`, or the default of the optimizer."""
        return self._or_default("lr")

    @property
    def betas(self) -> tuple[float, float]:
        """`beta1` and `beta2`, or the default of the optimizer."""
        return self._or_default("beta1"), self._or_default("beta2")

    def _or_default(self, name: str) -> float:
        """A setting, or the default of its optimizer; `auto` that `for_model` has not decided counts as `adamw`."""
        value: float | None = getattr(self, name)
        return _DEFAULTS.get(self.optimizer, _DEFAULTS["adamw"])[name] if value is None else value

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        tenth = self.steps // 10
        if self.warmup_steps is None:
            fewest, most = _WARMUP
            return min(max(tenth, fewest), most, self.steps // 5)
        return self.warmup_steps if self.warmup_steps <= self.steps else tenth

    def for_model(self, preset: str) -> "TrainSettings":
        """The settings with what they leave to the optimizer, for a model of this preset; empty = none."""
        is_new = self.weights == "all" and not self.init_from
        automatic: Optimizer = "muon" if preset in _SMALL and is_new else "adamw"
        chosen = replace(self, optimizer=automatic if self.optimizer == "auto" else self.optimizer)
        beta1, beta2 = chosen.betas
        return replace(chosen, lr=chosen.peak_lr, beta1=beta1, beta2=beta2, warmup_steps=chosen.warmup)
