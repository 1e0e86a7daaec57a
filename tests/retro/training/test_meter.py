"""What the utilization of a run counts as necessary operations."""

import pytest

from retro.data.settings import DataSettings
from retro.device import choose_placement
from retro.estimates.flops import training_flops
from retro.training import meter
from retro.training.meter import Utilization
from retro.training.run_settings import RunSettings
from tests.retro.small_model import SETTINGS


@pytest.mark.parametrize("dropout", [0.0, 0.25, 1.0])
def test_sequences_without_neighbors_count_without_retrieval(dropout: float, monkeypatch) -> None:
    data = DataSettings(sequence_length=16, k=2, retrieval_dropout=dropout)
    settings = RunSettings(SETTINGS, data)
    monkeypatch.setattr(meter, "peak_of_process", lambda placement: 1e12)
    found = Utilization.of(settings, choose_placement("cpu", "float32"), 3)
    on, off = (training_flops(SETTINGS, 16, k) for k in (2, 0))
    assert on > off
    assert found.flops_per_token == pytest.approx(((1 - dropout) * on + dropout * off) / 16)
    assert found.peak_flops == 3e12
