"""The files in deploy/ against the schemas of the projects that read them (`make test-interop`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from interop.models import client_warnings

KUBERNETES = "1.31"
pytestmark = pytest.mark.slow


@pytest.fixture
def deploy(project: Path) -> Path:
    folder = project / "deploy"
    if not folder.is_dir():
        pytest.skip("deploy/ is not part of this installation")
    return folder


@client_warnings
class TestKubernetes:
    client = "kubernetes-validate"

    def test_the_manifest_follows_the_schema(self, deploy: Path) -> None:
        """`deploy/kubernetes.yaml` against the schema of Kubernetes 1.31, strictly; a wrong type is refused"""
        import kubernetes_validate

        documents = list(yaml.safe_load_all((deploy / "kubernetes.yaml").read_text()))
        assert [each["kind"] for each in documents] == ["Deployment", "Service"]
        for each in documents:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        documents[0]["spec"]["replicas"] = "two"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(documents[0], KUBERNETES, strict=True)


@client_warnings
class TestKubeflow:
    client = "kubeflow-trainer-api"

    def test_the_job_follows_the_models(self, deploy: Path) -> None:
        """`deploy/trainjob.yaml` read and written by the models of the Kubeflow Trainer: no field is lost"""
        from kubeflow_trainer_api import models

        job = yaml.safe_load((deploy / "trainjob.yaml").read_text())
        # Unknown fields are dropped, so they would be missing here.
        assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


@client_warnings
class TestSkyPilot:
    client = "skypilot"

    def test_the_task_is_read(self, deploy: Path, tmp_path: Path, monkeypatch) -> None:
        """`deploy/skypilot.yaml` read by `sky.Task.from_yaml`, which checks its schema; a misspelt key is refused"""
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
        import sky

        task = sky.Task.from_yaml(str(deploy / "skypilot.yaml"))
        (resources,) = task.resources
        assert (task.num_nodes, resources.accelerators, resources.use_spot) == (
            2,
            {"H200": 8},
            True,
        )
        assert "torchrun" in task.run
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text((deploy / "skypilot.yaml").read_text().replace("num_nodes", "num_node"))
        with pytest.raises(ValueError, match="num_node"):
            sky.Task.from_yaml(str(wrong))
