import re
import tomllib
from pathlib import Path

import pytest

from stretto.base.extras import import_optional_dependency
from stretto.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_a_missing_package_is_answered_with_a_command_for_a_package_and_one_for_a_clone() -> None:
    with pytest.raises(ConfigError) as caught:
        import_optional_dependency("no_such_package.part", "onnx", "an export to ONNX")
    assert str(caught.value) == (
        "an export to ONNX needs no_such_package; pip install 'stretto[onnx]' (in a clone: pip install -e '.[onnx]')"
    )


def test_every_message_takes_its_install_command_from_one_place() -> None:
    sources = [path for path in (ROOT / "src").rglob("*.py") if "pip install 'stretto" in path.read_text()]
    assert [path.name for path in sources] == ["extras.py"]


def test_the_pages_name_extras_that_exist() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    named = {name.partition("]")[0] for name in pages.split("'.[")[1:]}
    assert named and named <= set(EXTRAS)


def test_the_extra_all_has_every_extra_but_those_of_clusters() -> None:
    named = [name for part in EXTRAS["all"] for name in part.removeprefix("stretto[").removesuffix("]").split(",")]
    assert sorted([*named, "all", "dask", "ray"]) == sorted(EXTRAS)


def test_ci_installs_one_version_of_each_tool_and_checks_its_hashes() -> None:
    text = (ROOT / ".ci" / "constraints.txt").read_text()
    pins = re.findall(r"^([a-z0-9-]+)==.* \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len({*pins}) == len(pins) == text.count("==") - text.count(" == ")
    tools = {re.split("[ ;]", tool)[0].lower() for tool in PROJECT["dependency-groups"]["dev"]}
    # triton is installed with torch.
    assert tools - {"triton"} <= {*pins} and not {"torch", "triton"} & {*pins}
    assert "://" not in text and "/" not in re.sub(r"\.ci/compile", "", text)
