"""The files in deploy/: their commands against our command line. tests/interop has the schemas of other projects."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pale.cli.main import parse
from pale.serve.guard import OPEN

DEPLOY = Path(__file__).parent.parent / "deploy"
if not DEPLOY.is_dir():
    pytest.skip("deploy/ is not part of this installation", allow_module_level=True)


@pytest.fixture(scope="module")
def documents() -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


@pytest.fixture(scope="module")
def container(documents) -> dict:
    (found,) = documents[0]["spec"]["template"]["spec"]["containers"]
    return found


def entry_point() -> list[str]:
    text = (DEPLOY / "Containerfile").read_text()
    return yaml.safe_load(re.search(r"^ENTRYPOINT (\[.*\])$", text, re.M)[1])


def test_the_arguments_are_options_of_the_command(container):
    words = [*entry_point()[1:], *container["args"]]
    command = parse(words)
    assert command.weights == ["/models/pets"]
    assert command.host == "0.0.0.0"
    assert command.port == container["ports"][0]["containerPort"]


def test_the_grace_period_covers_the_whole_shutdown(documents, container):
    command = parse([*entry_point()[1:], *container["args"]])
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    needed = float(seconds) + command.stop_delay + command.timeout
    assert documents[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed


def test_probes_ask_paths_that_need_no_token(container):
    paths = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "readiness", "liveness")
    }
    assert paths["startup"] == paths["readiness"] == "/v2/health/ready"
    assert paths["liveness"] == "/v2/health/live"
    assert set(paths.values()) <= OPEN


def test_the_container_has_no_rights_and_limited_resources(documents, container):
    pod = documents[0]["spec"]["template"]["spec"]
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == int(user[1]) != 0
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_every_path_that_the_containerfile_copies_exists():
    for line in (DEPLOY / "Containerfile").read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--from"):
            for path in words[1:-1]:
                assert (DEPLOY.parent / path).exists(), path


def scripts() -> dict[str, str]:
    """Return the shell scripts of the training files by name."""
    job = yaml.safe_load((DEPLOY / "trainjob.yaml").read_text())
    return {
        "train.sbatch": (DEPLOY / "train.sbatch").read_text(),
        "skypilot.yaml": yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["run"],
        "trainjob.yaml": job["spec"]["trainer"]["args"][0],
    }


@pytest.mark.parametrize("name", ["train.sbatch", "skypilot.yaml", "trainjob.yaml"])
@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_training_files_start_a_command_that_is_accepted(tmp_path, name, resumed):
    """Run the script with a torchrun that prints its arguments."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, text in (
        ("torchrun", 'printf "%s\\n" "$@"'),
        ("srun", 'exec "$@"'),
        ("scontrol", "echo first; seq 100000"),  # more lines than a pipe holds
    ):
        (tools / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tools / tool).chmod(0o755)
    run = tmp_path / "runs/pale_t"
    run.mkdir(parents=True)
    if resumed:
        (run / "recipe.yaml").touch()
    script = scripts()[name].replace("/run/pale/runs/pale_t", str(run))
    script = script.replace("/data/runs/pale_t", str(run))
    variables = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "RUN": str(run),
        "BUCKET": "s3://b",
        **dict.fromkeys(("SLURM_NNODES", "SKYPILOT_NUM_NODES", "PET_NNODES"), "2"),
        **dict.fromkeys(("SKYPILOT_NUM_GPUS_PER_NODE", "PET_NPROC_PER_NODE"), "8"),
        **dict.fromkeys(("SLURM_JOB_ID", "SKYPILOT_TASK_ID", "PET_NODE_RANK"), "7"),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SKYPILOT_NODE_IPS", "PET_MASTER_ADDR"), "first"),
        "PET_MASTER_PORT": "29500",
    }
    words = ["bash", "-c", script, name]
    if name == "train.sbatch":
        words += ["imagenet.pale_t", "--data.root", "DIR"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    assert given[given.index("--nnodes") + 1] == "2"
    command = given[given.index("-m") + 2 :]
    options = parse(command)
    assert options.resume == (run if resumed else None)
    assert options.recipe == (None if resumed else "imagenet.pale_t")
