"""Kubernetes manifests: valid by the published schemas, with restarts and grace periods that fit the exit codes."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import RunConfig
from stretto.cli.main import main
from stretto.config.toml import load_config
from stretto.errors import ConfigError
from stretto.launch import PodJob, dump_yaml, make_job_set, make_train_job
from stretto.mesh.node_info import find_node_info

SCHEMAS = Path(__file__).parents[3] / "shared" / "schemas"
FILES = {
    "JobSet": "jobset.x-k8s.io_jobsets.yaml",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes.yaml",
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
}
MAKERS = (make_job_set, make_train_job)
Maker = Callable[[RunConfig, PodJob], list[dict[str, Any]]]


def config(**sections: dict[str, Any]) -> RunConfig:
    fields: dict[str, Any] = {
        "data": {"train": "/runs/data/train"},
        "layout": {"replicas": 16},
        "run": {"folder": "/runs/first", "grace_seconds": 90},
        **sections,
    }
    return RunConfig.model_validate(fields)


def job(**fields: Any) -> PodJob:  # noqa: ANN401
    return PodJob(**{"name": "first", "image": "stretto:1", "num_nodes": 2, "volume": "runs:/runs", **fields})


@pytest.fixture(scope="module")
def schemas() -> dict[str, tuple[str, dict[str, Any]]]:
    """The API version and the strict schema of each kind."""
    if not SCHEMAS.is_dir():
        assert "CI" not in os.environ, "CI must have ../shared: a test that is skipped there tests nothing"
        pytest.skip("needs ../shared/schemas")
    loaded = {}
    for kind, file in FILES.items():
        definition = yaml.load((SCHEMAS / file).read_text(), yaml.CSafeLoader)["spec"]
        assert definition["names"]["kind"] == kind
        (version,) = definition["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        forbid_unknown_fields(schema)
        loaded[kind] = (f"{definition['group']}/{version['name']}", schema)
    return loaded


def forbid_unknown_fields(schema: Any) -> None:  # noqa: ANN401
    """Make unknown fields an error, as `kubectl apply` does; by itself, the schema allows them."""
    if isinstance(schema, list):
        for item in schema:
            forbid_unknown_fields(item)
    elif isinstance(schema, dict):
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
            schema["additionalProperties"] = False
        for item in schema.values():
            forbid_unknown_fields(item)


def check(documents: list[dict[str, Any]], schemas: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the kinds of documents, after validating those that have a schema."""
    for document in documents:
        if document["kind"] in schemas:
            version, schema = schemas[document["kind"]]
            assert document["apiVersion"] == version
            jsonschema.Draft202012Validator(schema).validate(document)
    return [document["kind"] for document in documents]


CASES = [{}, {"gpus_per_node": 0, "ranks_per_node": 8}, {"secret": "run-secret", "max_restarts": 0}]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_manifests_are_valid_by_the_published_schemas(
    fields: dict[str, Any], schemas: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    # As a cluster reads them: from the text.
    job_set, train_job = (list(yaml.safe_load_all(dump_yaml(make(config(), job(**fields))))) for make in MAKERS)
    assert check(job_set, schemas) == ["ConfigMap", "JobSet"]
    assert check(train_job, schemas) == ["ConfigMap", "TrainingRuntime", "TrainJob"]


def spoil(manifest: Any, path: str, value: object) -> None:  # noqa: ANN401
    *names, last = path.split(".")
    for name in names:
        manifest = manifest[int(name) if name.isdecimal() else name]
    manifest[last] = value


POD = "replicatedJobs.0.template.spec.template.spec"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.maxRestarts", 3),  # it belongs in failurePolicy
        ("spec.failurePolicy.rules.0.action", "FailJob"),
        ("spec.failurePolicy.maxRestarts", "3"),
        (f"spec.{POD}.gracePeriodSeconds", 3),
        (f"spec.{POD}.containers.0.resource", {}),
        (f"spec.{POD}.containers.0.env.0.value", 2),
    ],
)
def test_a_mistake_in_a_manifest_is_found(
    path: str, value: object, schemas: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    documents = make_job_set(config(), job())
    spoil(documents[1], path, value)
    with pytest.raises(jsonschema.ValidationError):
        check(documents, schemas)


def jobs_of(documents: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the spec of the JobSet, and that of its job."""
    spec = documents[1]["spec"]
    spec = spec["template"]["spec"] if documents[1]["kind"] == "TrainingRuntime" else spec
    (replicated,) = spec["replicatedJobs"]
    return spec, replicated["template"]["spec"]


@pytest.mark.parametrize("make", MAKERS)
def test_pods_have_the_time_to_save_that_the_config_says(make: Maker) -> None:
    _, spec = jobs_of(make(config(), job()))
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 90 + 10


def outcome(documents: list[dict[str, Any]], code: int) -> str:
    """Return what happens to the JobSet after a pod has exited with a code, by the rules of Job and JobSet."""
    job_set, spec = jobs_of(documents)
    assert spec["template"]["spec"]["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    reason = "BackoffLimitExceeded"
    for rule in spec["podFailurePolicy"]["rules"]:
        condition = rule["onExitCodes"]
        assert condition["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
        if rule["action"] == "FailJob" and condition["operator"] == "In" and code in condition["values"]:
            reason = "PodFailurePolicy"
    for rule in job_set["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.parametrize("make", MAKERS)
def test_a_lost_rank_and_a_preemption_restart_the_pods_but_a_mistake_does_not(make: Maker) -> None:
    documents = make(config(), job())
    codes = {75: "RestartJobSet", 137: "RestartJobSet", 1: "RestartJobSet", 2: "FailJobSet", 76: "FailJobSet"}
    assert {code: outcome(documents, code) for code in codes} == codes


def test_the_pods_of_a_job_set_are_nodes_of_one_job() -> None:
    _, spec = jobs_of(make_job_set(config(), job()))
    (container,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    node = find_node_info(variables)
    assert node is not None and (node.index, node.num_ranks, node.num_nodes) == (1, 16, 2)
    # JobSet names a pod after the JobSet, the replicated job, and the indices of job and pod.
    assert node.address == "first-node-0-0.first"
    assert spec["completions"] == spec["parallelism"] == 2 and spec["completionMode"] == "Indexed"


def test_the_config_in_the_pods_is_the_config_that_was_given(tmp_path: Path) -> None:
    original = config(run={"folder": "/runs/first", "timeout": 99})
    documents = list(yaml.safe_load_all(dump_yaml(make_job_set(original, job()))))
    (tmp_path / "run.toml").write_text(documents[0]["data"]["run.toml"])
    assert load_config(tmp_path / "run.toml") == original
    (container,) = jobs_of(documents)[1]["template"]["spec"]["containers"]
    assert container["command"] == ["stretto", "train", "/etc/stretto/run.toml"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"config": "/etc/stretto", "memory": "/dev/shm", "runs": "/runs"}


@pytest.mark.parametrize(
    ("sections", "fields", "message"),
    [
        ({"layout": {"replicas": 4}}, {}, "the layout needs 4 ranks, but 2 nodes with 8 each have 16"),
        ({}, {"volume": None}, r"run.folder=/runs/first would be lost with its pod; pass volume="),
        (
            {"run": {"folder": "runs/first"}},
            {},
            "run.folder=runs/first would be lost with its pod; use a folder",
        ),
        ({"data": {"train": "data/book"}}, {}, "data.train=data/book is relative to a folder of this machine"),
        ({}, {"name": "My_Run"}, "name='My_Run' can't name a job"),
        ({}, {"volume": "runs"}, "volume='runs' is not a claim and a path"),
        ({}, {"num_nodes": 0}, "num_nodes=0, .* can't be used together"),
    ],
)
def test_what_pods_could_not_run_is_refused(sections: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    for make in MAKERS:
        with pytest.raises(ConfigError, match=message):
            make(config(**sections), job(**fields))


def test_object_storage_needs_no_volume() -> None:
    original = config(save={"to": "s3://bucket/run"}, layout={"elastic": True}, data={"train": "s3://bucket/data"})
    with pytest.raises(ConfigError, match="pass --secret"):
        make_job_set(original, job(volume=None))
    _, spec = jobs_of(make_job_set(original, job(volume=None, secret="run")))
    assert [volume["name"] for volume in spec["template"]["spec"]["volumes"]] == ["config", "memory"]


def test_the_command_prints_what_the_library_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntrain = "/runs/data/train"\n[layout]\nreplicas = 16\n[run]\nfolder = "/runs/first"\n')
    options = ["--image", "stretto:1", "--nodes", "2", "--volume", "runs:/runs", "--name", "first"]
    for kind, make in zip(("jobset", "trainjob"), MAKERS, strict=True):
        command = ["manifest", kind, str(path), *options, "--run.grace_seconds", "90"]
        assert main(command) == 0
        assert capsys.readouterr().out == dump_yaml(make(config(), job()))
    assert main(["manifest", "jobset", str(path), *options, "--layout.replicas", "3"]) == 2
    assert "the layout needs 3 ranks" in capsys.readouterr().err


TEXT = st.text(st.characters(codec="utf-8"))
SCALARS = (
    st.none() | st.booleans() | st.integers() | TEXT | st.sampled_from(["no", "1e3", "a\n\nb\n", " a\nb\n", "~", "0x1"])
)
VALUES = st.recursive(SCALARS, lambda items: st.lists(items) | st.dictionaries(TEXT, items), max_leaves=12)


@settings(max_examples=25)
@given(st.lists(st.dictionaries(TEXT, VALUES), min_size=1, max_size=3))
def test_yaml_is_read_back_as_what_was_written(documents: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(documents)
    assert list(yaml.safe_load_all(dump_yaml(documents))) == before
