"""Layer profiles: each number is the pure function's on the cached states, whatever the tokens and options."""

import json

import numpy as np
import pytest
import torch

from mmlens import LayerProfile, PerExample
from mmlens.errors import MetricError, OptionError, RunFolderError, TokenGroupError
from mmlens.layers import PROFILE_METRICS
from mmlens.metrics import erank, mixig, rid, tme
from mmlens.metrics.residual import rid_reference


def _states(toy, example, tokens):
    prompt = toy.prompt(
        example.question,
        images=list(example.images),
        subject=example.subject,
        evidence=list(example.evidence),
        distractors=list(example.distractors),
    )
    at = list(prompt.tokens(tokens).positions)
    _, cache = toy.run_with_cache(prompt, ["resid_pre", "resid_mid", "resid_post"])
    return [
        [cache[name, layer][0, at].double() for name in ("resid_pre", "resid_mid", "resid_post")]
        for layer in range(toy.n_layers)
    ]


@pytest.mark.parametrize("tokens", ["all", "image", "question+suffix"])
@pytest.mark.parametrize("reference", ["module", "block_input"])
def test_every_number_is_the_pure_functions(toy, scenes, tokens, reference):
    options = dict(metrics=PROFILE_METRICS, tokens=tokens, reference=reference, alpha=8.0, n=2)
    profile = toy.layer_profile(scenes, **options)
    for i, example in enumerate(scenes.examples("rank", 2, 0)):
        for layer, (x, mid, y) in enumerate(_states(toy, example, tokens)):
            for m, (before, after) in enumerate([(x, mid), (mid if reference == "module" else x, y)]):
                parts = rid_reference(before, after)
                expected = {
                    "rid": parts.total,
                    "complexity": parts.complexity,
                    "support": parts.support,
                    "erank": erank(after),
                    "tme": tme(after, alpha=8.0),
                    "mixig": mixig(before, after, alpha=8.0),
                }
                for metric, value in expected.items():
                    # batches are padded, so that float32 states differ in the last digits
                    assert profile.samples[metric][i, m, layer] == pytest.approx(float(value), rel=1e-3, abs=1e-5)
            assert profile.ranks[i, layer] == int(torch.linalg.matrix_rank(x, rtol=max(x.shape) * 2.2e-16))


def test_options_matter_and_are_told(toy, scenes):
    base = toy.layer_profile(scenes, metrics=["rid", "mixig"], n=2)
    assert json.loads(json.dumps(base.provenance)) == base.provenance and base.provenance["tokens"] == "all"
    for change in (
        dict(tokens="image"),
        dict(reference="block_input"),
        dict(norm=True),
        dict(alpha=8.0),
        dict(rows="last"),
        dict(rtol=0.5),
        dict(seed=1),
        dict(split="judge"),
    ):
        other = toy.layer_profile(scenes, metrics=["rid", "mixig"], n=2, **change)
        same = all(np.allclose(base.samples[m], other.samples[m], rtol=1e-9) for m in base.metrics)
        assert not same and other.provenance != base.provenance, change
    mlp = toy.layer_profile(scenes, metrics=["rid"], modules=["mlp"], n=2)
    assert np.array_equal(mlp.samples["rid"][:, 0], base.samples["rid"][:, 1])


def test_a_profile_knows_its_verbs(toy, scenes, tmp_path):
    profile = toy.layer_profile(scenes, metrics=["mixig", "rid"], n=4)
    table = profile.to_pandas()
    assert (
        len(table) == 2 * 2 * toy.n_layers
        and (table.low <= table["mean"]).all()
        and (table["mean"] <= table.high).all()
    )
    again = LayerProfile.load(profile.save(tmp_path / "p"))
    assert again.modules == profile.modules and again.provenance == profile.provenance and again.n_valid == 4
    assert all(np.array_equal(again.samples[m], profile.samples[m]) for m in profile.metrics)
    assert (again.ranks == profile.ranks).all()
    for metric in (None, "rid"):
        assert profile.plot(metric).save(tmp_path / f"{metric}.html").stat().st_size > 100_000
    with pytest.raises(OptionError):
        profile.values("erank")
    with pytest.raises(RunFolderError):
        LayerProfile.load(tmp_path)


def test_mixing_gains_sum_over_the_modules_of_a_layer(toy, scenes):
    one = toy.layer_profile(scenes, metrics=["mixig", "tme"], n=2)
    whole = toy.layer_profile(scenes, metrics=["mixig"], reference="block_input", n=2)
    assert np.allclose(one.samples["mixig"].sum(1), whole.samples["mixig"][:, 1], atol=1e-12)


def test_broken_activations_are_named_and_counted(toy, scenes):
    inf = lambda tensor, hook: torch.full_like(tensor, torch.inf)
    with toy.hooks([("blocks.5.hook_mlp_out", inf)]):
        profile = toy.layer_profile(scenes, metrics=["rid", "tme"], n=2)
    assert profile.n_valid == 0 and set(profile.reasons) == {"0", "1"}
    assert profile.reasons["0"] == "infinities or NaN in blocks.5.hook_resid_post"
    assert np.isnan(profile.samples["rid"]).all() and np.isnan(profile.values("tme")).all()


def test_each_state_is_decomposed_once(toy, scenes, monkeypatch):
    """A layer's input is the last one's output, but for what DeepStack adds after the first two."""
    from mmlens.metrics.residual import Spectrum

    made = []
    real = Spectrum.of
    monkeypatch.setattr(Spectrum, "of", lambda state: made.append(1) or real(state))
    toy.layer_profile(scenes, metrics=["rid"], tokens="image", n=1)
    assert len(made) == 2 * toy.n_layers + 1 + 2


def test_single_tokens_have_an_answer(toy, scenes):
    profile = toy.layer_profile(scenes, metrics=["rid", "erank", "tme"], tokens="last", n=2)
    assert np.allclose(profile.samples["erank"], 1) and np.allclose(profile.samples["tme"], 0)
    assert ((profile.samples["rid"] >= 0) & (profile.samples["rid"] <= 1)).all() and (profile.ranks == 1).all()


@pytest.mark.parametrize(
    "options,error",
    [
        (dict(metrics="rid"), OptionError),
        (dict(metrics=["rid", "rid"]), OptionError),
        (dict(metrics=["rids"]), OptionError),
        (dict(metrics=[]), OptionError),
        (dict(modules=["attention"]), OptionError),
        (dict(reference="input"), OptionError),
        (dict(rows="all"), OptionError),
        (dict(rtol=3.0), MetricError),
        (dict(alpha=-1.0), MetricError),
        (dict(tokens="nonsense"), TokenGroupError),
        (dict(n=0), OptionError),
    ],
)
def test_what_means_nothing_is_refused(as_users, toy, scenes, options, error):
    with pytest.raises(error):
        toy.layer_profile(scenes, **{"n": 2, **options})


def test_states_are_batched_and_cut_per_example(toy, scenes):
    pair = toy.layer_profile(scenes, metrics=["rid"], tokens=PerExample(["image", "question"]), n=2)
    image, words = (toy.layer_profile(scenes, metrics=["rid"], tokens=t, n=2) for t in ("image", "question"))
    assert np.allclose(pair.samples["rid"][0], image.samples["rid"][0], rtol=1e-6)
    assert np.allclose(pair.samples["rid"][1], words.samples["rid"][1], rtol=1e-6)
    assert float(rid(torch.eye(2), torch.eye(2))) == 0
