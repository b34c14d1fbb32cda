"""The predicted loss of a tied matrix is that of the head and that of the embedding, each once."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aespa_pl.algorithm.end_loss import predicted, uncompensated, uncorrected
from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.algorithm.hessian import LEAST_DAMPING, MOST_DAMPING, damping_for
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.calibration.end_loss import end_loss
from aespa_pl.models import family_of
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import OptqSettings, QuantizationSettings
from aespa_pl.sizing.matrices import ROWS, SEED, predicted_losses, typed_matrices
from tests.export.configurations import llama
from tests.models.examples import make_ids, save
from tests.models.test_streamed import open_stream

TYPE = "Q4_0"


@pytest.mark.parametrize("correction", [0.0, 0.5])
def test_a_tied_matrix_has_the_losses_of_head_and_embedding(tmp_path: Path, correction: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(hidden_size=64, tie_word_embeddings=True)).eval()
    settings, family, ids = (
        QuantizationSettings(input_correction=correction, optq=OptqSettings(enabled=True)),
        family_of(model.config),
        make_ids(16),
    )
    source = open_stream(save(model, tmp_path))
    layouts = family.layouts(model.config)
    shape = Shape.of(model.config, layouts)
    matrices = typed_matrices(layouts, shape, {}, tied=True, candidates=lambda _: (TYPE,))
    assert matrices[0].keys == ("embedding",)
    found = predicted_losses(source, ids, matrices, settings)[0][TYPE]
    losses, form = {}, GridFormat.of(TYPES[TYPE])
    for seen in end_loss(source, ids, seed=SEED):
        if seen.name == "head" and seen.inputs is not None:
            D = uncompensated(seen.inputs, damping_for(settings.damping, 0, 0))
            losses["head"] = predicted(seen.weight, seen.gradients[:, None], D, form, ROWS)
        elif seen.name == "embedding":
            ones = torch.ones(seen.weight.shape[1])
            damping = damping_for(settings.damping, 64, ids.numel())
            left = uncorrected(seen.weight, ids.flatten().bincount()[seen.rows], damping, correction)
            losses["embedding"] = predicted(seen.weight, seen.gradients * left[:, None], ones, form, ROWS)
    assert min(losses.values()) > 0
    assert found == pytest.approx(losses["head"] + losses["embedding"], rel=1e-4)


@pytest.mark.parametrize(("compensates", "few"), [(True, False), (True, True), (False, False)])
def test_without_compensation_all_of_an_inputs_error_counts(
    tmp_path: Path, compensates: bool, few: bool
) -> None:
    """What is rounded to nearest, as by rtn, loses in proportion to the diagonal of H.

    On fewer tokens than columns nearly all errors could be made up for, so a large damping is taken there.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(hidden_size=64, intermediate_size=64)).eval()
    settings = QuantizationSettings(optq=OptqSettings(enabled=compensates))
    ids, layouts = make_ids(1 if few else 16), family_of(model.config).layouts(model.config)
    source = open_stream(save(model, tmp_path))
    shape = Shape.of(model.config, layouts)
    matrices = typed_matrices(layouts, shape, {}, tied=False, candidates=lambda _: (TYPE,))
    found = predicted_losses(source, ids, matrices, settings)
    of_key = {m.keys[0]: losses[TYPE] for m, losses in zip(matrices, found, strict=True)}
    for seen in end_loss(source, ids, seed=SEED):
        if (seen.block, seen.name) == (0, "down_proj"):
            inputs = seen.inputs
            D = (
                uncompensated(inputs, MOST_DAMPING if few else LEAST_DAMPING)
                if compensates
                else inputs.diagonal()
            )
            gradients = seen.gradients if seen.gradients.dim() > 1 else seen.gradients[:, None]
            expected = predicted(seen.weight, gradients, D, GridFormat.of(TYPES[TYPE]), ROWS)
            assert of_key["0.down_proj"] == pytest.approx(expected, rel=1e-4)
