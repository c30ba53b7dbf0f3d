import pytest

from stretto.errors import DataError
from stretto.train.data_spec import read_data_spec

SPEC = (
    b'{"task": {"inputs": "tokens", "targets": "next_token", "num_inputs": 2, "num_outputs": 2},'
    b' "labels": [], "channels": null, "origin": null, "target_values": null}'
)


@pytest.mark.parametrize("name", ["data_spec.json", "vocabulary.json"])
def test_a_file_that_is_nested_too_deeply_is_one_sentence(name: str) -> None:
    files = {"data_spec.json": SPEC}
    assert read_data_spec(files.get, "runs/first").task.num_inputs == 2
    files[name] = b"[" * 100_000
    with pytest.raises(DataError, match=r"runs/first.*can't be read \(.*it is nested too deeply.*\)"):
        read_data_spec(files.get, "runs/first")
