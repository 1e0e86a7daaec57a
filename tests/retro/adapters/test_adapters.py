"""Trained weights change, frozen weights stay bit-equal, and adapters respect chunks and documents."""

from collections.abc import Mapping
from itertools import repeat
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.adapters.adapters import RETRIEVAL, add_adapter, check_parallel, is_adapter, matrices, merge, train_only
from retro.adapters.settings import NO_LORA, LoraSettings, check_trained
from retro.batch.inputs import Inputs
from retro.model.residual_block import Residual
from retro.model.retro import Retro
from retro.parallel.settings import ParallelSettings
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from tests.retro.small_model import batch, build, every_scheme, inputs, logits, step_of

PREFIX = {"attention.prefix_tokens": 3}
METHODS: dict[str, dict[str, Any]] = {
    "all": {},
    "retrieval": {"weights": "retrieval"},
    "lora": {"weights": "none", "rank": 2},
    "retrieval and lora": {"weights": "retrieval", "rank": 2},
    "prefix": {"weights": "none", "options": PREFIX},
    "retrieval and prefix": {"weights": "retrieval", "options": PREFIX},
    "lora and prefix": {"weights": "none", "rank": 2, "options": PREFIX},
}
every_method = pytest.mark.parametrize("method", METHODS)


READERS: dict[str, dict[str, Any]] = {
    "cross-attention": {},
    "copying": {"copy_head.neighbors": True, "retrieval.cca_layers": ()},
    "cross-attention and copying, a base that copies": {"copy_head.context": True, "copy_head.neighbors": True},
}
"""Options of models that read neighbors."""
every_reader = pytest.mark.parametrize("reader", READERS)


def build_tuned(
    scheme: str = "rope",
    trained: bool = False,
    reader: str = "cross-attention",
    weights: Any = "all",
    options: Mapping[str, Any] = MappingProxyType({}),
    **lora: Any,
) -> Retro:
    """A small model with an adapter. With `trained`, adapter weights are random instead of their initial values."""
    model = build(scheme, **READERS[reader], **options)
    add_adapter(model, LoraSettings(**lora))
    train_only(model, weights)
    if trained:
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def train_steps(model: Retro, count: int, data: Inputs, lr: float = 1e-2) -> list[float]:
    """The losses of a few training steps on one batch."""
    settings = TrainSettings(steps=count, warmup_steps=0, lr_schedule="constant", lr=lr, monitor_every=1)
    optimizer = make_optimizer([model.train()], TrainSettings(lr=lr))
    step = step_of(model, optimizer, repeat(data), settings)
    losses = [step(number).metrics["loss"] for number in range(count)]
    model.eval()
    return losses


def weights(model: Retro) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# ------------------------------------------------------------------------------------------------------ trained weights


@every_method
def test_exactly_the_selected_weights_are_trained(method: str) -> None:
    model = build_tuned(**METHODS[method])
    before = weights(model)
    losses = train_steps(model, 12, inputs())
    assert losses[-1] < losses[0] - 0.02
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    whole = {"all": ("",), "retrieval": RETRIEVAL, "none": ()}[METHODS[method].get("weights", "all")]
    assert changed == {name for name in before if is_adapter(name) or name.startswith(whole)}


@every_reader
def test_retrieval_off_stays_bit_equal_to_the_base(reader: str) -> None:
    model = build_tuned(weights="retrieval", reader=reader)
    tokens, neighbors, lengths = batch()
    off, on = logits(model, tokens), logits(model, tokens, None, neighbors, lengths)
    train_steps(model, 3, inputs())
    assert torch.equal(logits(model, tokens), off)
    assert not torch.allclose(logits(model, tokens, None, neighbors, lengths), on, atol=1e-3)


@every_reader
@pytest.mark.parametrize("method", ["retrieval", "retrieval and lora", "retrieval and prefix"])
def test_a_batch_without_neighbors_trains_adapters_only(method: str, reader: str) -> None:
    model = build_tuned(reader=reader, **METHODS[method])
    before = weights(model)
    losses = train_steps(model, 3, inputs(on=False))
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if is_adapter(name)}
    assert (losses[0] == losses[-1]) == (method == "retrieval")


def test_a_frozen_decoder_saves_no_activations_below_the_first_cross_attention() -> None:
    whole, frozen = build().train(), build().train()
    train_only(frozen, "retrieval")

    def kept(model: Retro) -> dict[str, int]:
        """Bytes that autograd keeps, by the block that runs."""
        sizes, running = dict[str, int](), [""]

        def keep(tensor: Tensor) -> Tensor:
            sizes[running[-1]] = sizes.get(running[-1], 0) + tensor.nbytes
            return tensor

        for name, module in model.named_modules():
            if isinstance(module, Residual):
                module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
                module.register_forward_hook(lambda *_: running.pop() and None)
        tokens, neighbors, _ = batch()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.hidden(Inputs(tokens, None, neighbors))
        return sizes

    all_kept, frozen_kept = kept(whole), kept(frozen)
    assert {"attention.0", "feed_forward.0", "attention.1"} <= set(all_kept)
    assert not {"attention.0", "feed_forward.0", "attention.1"} & set(frozen_kept)  # CCA is in layers 2 and 4
    assert frozen_kept["cross.4"] == all_kept["cross.4"]
    assert frozen_kept["feed_forward.1"] < all_kept["feed_forward.1"]


def test_settings_without_effect_are_rejected_with_their_key() -> None:
    for settings, words in [
        ({"rank": -1}, r"lora\.rank = -1"),
        ({"alpha": 0.0}, r"lora\.alpha = 0"),
        ({"dropout": 1.0}, r"lora\.dropout = 1"),
        ({"rank": 8, "targets": ()}, r"lora\.targets"),
    ]:
        with pytest.raises(InputError, match=words):
            LoraSettings(**settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"weights = \"some\".*'all', 'retrieval' or 'none'"):
        TrainSettings(weights="some")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"train\.weights = 'none'.*lora\.rank or model\.attention\.prefix_tokens"):
        check_trained("none", NO_LORA, 0)
    with pytest.raises(InputError, match=r"train\.weights = 'retrieval'.*model\.retrieval\.cca_layers"):
        train_only(build(**{"retrieval.cca_layers": ()}), "retrieval")
    with pytest.raises(InputError, match=r"parallel\.tensor = 2.*lora\.rank = 8"):
        check_parallel(LoraSettings(rank=8), ParallelSettings(tensor=2))


# ----------------------------------------------------------------------------------------------------------------- LoRA


@every_scheme
def test_lora_starts_bit_equal_to_the_base_and_merging_keeps_its_logits(scheme: str) -> None:
    tokens, neighbors, lengths = batch()
    base = logits(build(scheme), tokens, None, neighbors, lengths)
    targets = ("attention", "feed_forward", "cross", "encoder")
    assert torch.equal(logits(build_tuned(scheme, rank=2, targets=targets), tokens, None, neighbors, lengths), base)
    model = build_tuned(scheme, rank=2, targets=targets, trained=True)
    adapted = logits(model, tokens, None, neighbors, lengths)
    assert not torch.allclose(adapted, base, atol=0.1)
    merge(model)
    assert model.state_dict().keys() == build(scheme).state_dict().keys()
    torch.testing.assert_close(logits(model, tokens, None, neighbors, lengths), adapted, rtol=1e-4, atol=1e-5)


def test_loras_products_are_scaled_by_alpha_over_rank() -> None:
    def change(**settings: Any) -> Tensor:
        """What LoRA adds to a matrix."""
        torch.manual_seed(0)
        tuned, name = build_tuned(trained=True, **settings), "attention.0.block.q_proj.weight"
        return merge(tuned).get_parameter(name).detach() - build().get_parameter(name).detach()

    torch.testing.assert_close(change(rank=2, alpha=8.0), 4 * change(rank=2, alpha=2.0), rtol=1e-4, atol=1e-6)


def test_targets_select_modules_and_unknown_ones_are_rejected_with_the_accepted() -> None:
    def adapted(*targets: str) -> set[str]:
        names = [name for name, _ in build_tuned(rank=2, targets=targets).named_parameters() if is_adapter(name)]
        return {name.split(".lora_")[0] for name in names}

    assert adapted("attention.q_proj") == {f"attention.{layer}.block.q_proj" for layer in range(4)}
    assert adapted("cross.attention.o_proj", "encoder.feed_forward.up_proj") == {
        "cross.2.block.attention.o_proj",
        "cross.4.block.attention.o_proj",
        "encoder.feed_forward.0.block.up_proj",
        "encoder.feed_forward.1.block.up_proj",
    }
    assert adapted("attention") == {
        name for kind in ("q_proj", "k_proj", "v_proj", "o_proj") for name in adapted(f"attention.{kind}")
    }
    with pytest.raises(InputError, match=r"'attention\.q'.*attention\.q_proj, .*feed_forward\.up_proj"):
        adapted("attention.q")
    names = matrices(build(**{"experts.num_experts": 4}, tied_embeddings=False))
    assert {"feed_forward.router", "head"}.isdisjoint(names)
    assert len(names["feed_forward.up_proj"]) == 2  # the layers without experts
