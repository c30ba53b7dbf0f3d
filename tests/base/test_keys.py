from stretto.base.keys import derive_key


def test_a_key_is_the_same_on_every_machine_and_forever() -> None:
    # Written down once: a change here changes every run's weights and masks.
    assert derive_key(1, "step", 7) == 6889534592200868702


def test_different_paths_have_different_keys() -> None:
    assert (
        len(
            {
                derive_key(1, "a", "b"),
                derive_key(1, "a:b"),
                derive_key(1, "ab"),
                derive_key(1, 2),
                derive_key(1, "2"),
                derive_key(12),
            }
        )
        == 6
    )


def test_neighboring_paths_have_different_keys() -> None:
    keys = {derive_key(seed, name, index) for seed in range(10) for name in ("a", "b") for index in range(50)}
    assert len(keys) == 1000
    assert all(0 <= key < 2**63 for key in keys)
