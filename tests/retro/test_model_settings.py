"""Model settings: set by key, read from JSON, grouped by the roles of their fields."""

import json
from dataclasses import asdict, is_dataclass

import pytest

from indexing.store.errors import InputError
from retro.model_settings import (
    NO_COPY_HEAD,
    AttentionSettings,
    ExpertSettings,
    ModelSettings,
    RetrievalSettings,
    flatten,
    from_json,
    keys_with,
    keys_without_effect,
    updated,
)

OTHER = updated(
    ModelSettings(), {"vocab_size": 7, "attention.num_heads": 2, "retrieval.cca_layers": (2,), "rope.scaling": "linear"}
)


def test_settings_survive_a_json_round_trip() -> None:
    for settings in (ModelSettings(), OTHER):
        assert from_json(json.loads(json.dumps(asdict(settings)))) == settings
    assert from_json({"d_model": 32, "retrieval": {"cca_layers": [1]}}) == updated(
        ModelSettings(copy_head=NO_COPY_HEAD), {"d_model": 32, "retrieval.cca_layers": (1,)}
    )


def test_every_setting_can_be_set_by_its_key() -> None:
    assert updated(ModelSettings(), flatten(OTHER)) == OTHER
    assert not any(is_dataclass(value) for value in flatten(OTHER).values())
    with pytest.raises(InputError, match=r"model\.attention\.heads"):
        updated(OTHER, {"attention.heads": 3})
    with pytest.raises(InputError, match=r"model\.attention\.num_heads = 0"):
        updated(OTHER, {"attention.num_heads": 0})


@pytest.mark.parametrize("left_out", ["copy_head", "copy_head.datastore"])
def test_a_model_that_was_stored_before_a_source_of_the_copy_head_existed_lacks_it(left_out: str) -> None:
    stored = asdict(updated(OTHER, {"copy_head.neighbors": True, "copy_head.context": True}))
    section, _, name = left_out.partition(".")
    stored[section] = {key: value for key, value in stored[section].items() if name and key != name}
    head = from_json(stored).copy_head
    assert (head.context, head.neighbors, head.datastore) == (bool(name), bool(name), False)


def test_every_setting_has_a_role_for_presets_and_bases() -> None:
    sizes = keys_with("size")
    assert {"d_model", "attention.num_heads", "encoder.num_layers", "retrieval.cca_layers"} <= sizes
    assert {"attention.positions", "chunk_length", "vocab_size"}.isdisjoint(sizes)
    roles = {role: keys_with("with_base", role) for role in ("decoder", "retrieval", "switch", "free")}
    assert sum(map(len, roles.values())) == len(flatten(ModelSettings()))
    assert roles["switch"] == {
        "shared_embeddings",
        "attention.prefix_tokens",
        "retrieval.reader",
        "copy_head.context",
        "copy_head.neighbors",
        "copy_head.datastore",
    }
    assert {"d_model", "rope.theta", "experts.num_experts"} <= roles["decoder"]


@pytest.mark.parametrize(
    ("settings", "without", "with_effect"),
    [
        (
            ModelSettings(),
            {"rope.factor", "experts.every", "mup_base_width", "attention.max_positions"},
            {"rope.theta"},
        ),
        (ModelSettings(attention=AttentionSettings(positions="alibi")), {"rope.theta"}, {"encoder.d_model"}),
        (ModelSettings(retrieval=RetrievalSettings(cca_layers=())), {"encoder.d_model"}, {"retrieval.cca_layers"}),
        (ModelSettings(experts=ExpertSettings(num_experts=4), init="mup"), set(), {"experts.every", "mup_base_width"}),
    ],
)
def test_settings_of_unused_parts_have_no_effect(
    settings: ModelSettings, without: set[str], with_effect: set[str]
) -> None:
    found = keys_without_effect(settings)
    assert without <= found
    assert with_effect.isdisjoint(found)
    assert found < set(flatten(settings))


def test_a_setting_that_does_not_exist_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="content_width"):
        from_json({"copy_head": {"content_width": 8}})
