import pytest
import torch

from stretto.base.randomness import keep_mask, mix


def test_mix_is_one_to_one_and_sets_every_bit_half_of_the_time() -> None:
    mixed = mix(torch.arange(-50_000, 50_000))
    assert len(set(mixed.tolist())) == 100_000
    bits = (mixed.unsqueeze(1) >> torch.arange(64)) & 1
    assert (bits.double().mean(dim=0) - 0.5).abs().max() < 0.01


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.8, 0.999])
def test_a_mask_keeps_the_given_fraction(keep: float) -> None:
    mask = keep_mask(torch.arange(4000), 500, keep).double()
    deviation = (keep * (1 - keep) / mask.numel()) ** 0.5
    assert abs(mask.mean() - keep) < 5 * deviation
    for dim in (0, 1):
        means = mask.mean(dim)
        expected = (keep * (1 - keep) / mask.shape[dim]) ** 0.5
        assert abs(means.std() / expected - 1) < 0.15


def test_a_keep_probability_of_almost_one_keeps_everything() -> None:
    assert keep_mask(torch.arange(2000), 500, 1 - 1e-12).double().mean() > 0.99999


def test_keys_and_features_are_independent_of_each_other() -> None:
    centered = keep_mask(torch.arange(3000), 300, 0.5).double() - 0.5
    between_features = (centered.T @ centered / 3000 * 4).fill_diagonal_(0)
    between_keys = (centered @ centered.T / 300 * 4).fill_diagonal_(0)
    # Five standard deviations and some, for the largest of that many correlations.
    assert between_features.abs().max() < 6 / 3000**0.5
    assert between_keys.abs().max() < 6.5 / 300**0.5


def test_a_mask_is_the_same_for_part_of_the_keys_as_for_all() -> None:
    keys = torch.arange(60).view(6, 10) * 12345
    whole = keep_mask(keys, 33, 0.7)
    assert torch.equal(keep_mask(keys[2:4, 5:], 33, 0.7), whole[2:4, 5:])


def test_a_mask_is_the_same_forever() -> None:
    # Written down once: a change here changes every run that uses dropout.
    assert keep_mask(torch.tensor([7]), 16, 0.5).int().tolist() == [[1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1]]
