"""Commands in two processes, started by torchrun as a user does."""

import os
import signal
import subprocess
import sys
import tempfile


def torchrun(
    *arguments: object, script: tuple[str, ...] = ("-m", "pale"), restarts: int = 0
) -> str:
    """What the command says; what the processes leave in the folder for temporary files goes with them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}"] * bool(restarts)
    with tempfile.TemporaryDirectory(prefix="launch") as folder:
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder}
        done = subprocess.run(
            [*command, *script, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | own,
            timeout=180,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def heed_ctrl_c() -> None:
    """To be called in a new process: one started by a job in the background would ignore Ctrl-C, as that does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
