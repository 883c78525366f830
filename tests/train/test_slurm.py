"""A real SLURM on this machine: deploy/train.sbatch saves on SIGTERM and resumes; a job array predicts in shards."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from support.weights import pixels, weights

from pale.train.log import read

SCRIPT = Path(__file__).parents[2] / "deploy/train.sbatch"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue")
PLACES = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
MODEL = "{depths: [1, 1, 1, 1], channels: [16, 32, 64, 128], heads: [2, 2, 4, 8]}"
CONFIG = """\
ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.log
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def slurm(tmp_path):
    """Start munged, slurmctld and slurmd, and return the environment of the commands."""
    if missing := [name for name in NEEDED if not shutil.which(name, path=PLACES)]:
        pytest.skip(f"SLURM is not installed: no {', '.join(missing)} (apt-get install slurm-wlm)")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    folder = tmp_path / "slurm"
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    host = socket.gethostname().split(".")[0]
    ports = free_port(), free_port()
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=ports))
    env = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), PLACES)),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPT.parents[1] / "src"),
    }
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key"]
    munge += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemons = []
    for words in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
        with (folder / f"{words[0]}.out").open("wb") as output:
            daemons.append(subprocess.Popen(words, env=env, stdout=output, stderr=output))
        time.sleep(2)
    yield env
    for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait(30)


def submit(env: dict[str, str], run: Path, epochs: int) -> str:
    options = ["--nodes", "1", "--gpus-per-node=0", "--cpus-per-task=2", "--time", "10"]
    recipe = ["quickstart", "--device", "cpu", "--model.options", MODEL, "--data.workers", "0"]
    recipe += ["--log_every", "1", "--batch", "16", "--data.size", "32", "--data.samples", "160"]
    recipe += ["--epochs", str(epochs)]
    words = ["sbatch", "--parsable", *options, "-o", str(run) + ".out", str(SCRIPT), *recipe]
    env = env | {"RUN": str(run)}
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=60, check=True, cwd=run.parent
    )
    return done.stdout.strip()


def wait_for(condition, output: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(output.read_text()[-3000:] if output.exists() else "the job has no output")
        time.sleep(0.5)


def has_left(env: dict[str, str], job: str) -> bool:
    """Return whether a job is no longer in the queue."""
    words = ["squeue", "-h", "-j", job]
    found = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    return not found.stdout.strip()


@pytest.mark.slow
def test_a_job_saves_on_sigterm_and_the_same_submission_resumes(slurm, tmp_path):
    run, output = tmp_path / "run", tmp_path / "run.out"

    def steps() -> list[int]:
        return [e["step"] for e in read(run / "log.jsonl") if e["event"] == "step"]

    job = submit(slurm, run, 500)
    wait_for(lambda: len(steps()) > 3, output)
    subprocess.run(["scancel", "--signal=TERM", job], env=slurm, check=True, timeout=60)
    wait_for(lambda: has_left(slurm, job), output)
    last = read(run / "log.jsonl")[-1]
    assert (last["event"], last["signal"]) == ("stop", 15)
    job = submit(slurm, run, 500)
    wait_for(lambda: max(steps()) > last["step"] + 3, output)
    subprocess.run(["scancel", "--signal=TERM", job], env=slurm, check=True, timeout=60)
    wait_for(lambda: has_left(slurm, job), output)
    starts = [e["step"] for e in read(run / "log.jsonl") if e["event"] == "start"]
    assert starts == [0, last["step"]]


@pytest.mark.slow
def test_a_job_array_predicts_every_image_once(slurm, tmp_path):
    """The command of docs/predict.md: `--array` and `--shard $SLURM_ARRAY_TASK_ID/N`, then `--merge`."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for i in range(12):
        Image.fromarray(pixels(20 + i, 30)).save(photos / f"{i}.png")
    (photos / "bad.png").write_bytes(b"no image")
    file = weights(tmp_path)["classification"]
    predict = f"{sys.executable} -m pale predict"
    line = (
        f"{predict} {photos} --weights {file} --device cpu --shard $SLURM_ARRAY_TASK_ID/2 -o {out}"
    )
    words = [
        "sbatch",
        "--parsable",
        "--array=0-1",
        "-o",
        str(tmp_path / "array-%a.out"),
        "--wrap",
        line,
    ]
    done = subprocess.run(
        words, env=slurm, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    wait_for(lambda: has_left(slurm, done.stdout.strip()), tmp_path / "array-0.out")
    subprocess.run([*predict.split(), "--merge", str(out)], env=slurm, timeout=120)
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert sorted(line["picture"] for line in lines) == sorted(f"{i}.png" for i in range(12))
    assert "bad.png" in (out / "failures.jsonl").read_text()
    assert sorted(path.name for path in (out / "parts").iterdir()) == [
        "0000-of-0002",
        "0001-of-0002",
    ]
