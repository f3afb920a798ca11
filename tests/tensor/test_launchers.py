"""torchrun with two launchers on one machine, as two hosts."""

import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "two_hosts.py"


def test_two_launchers_as_two_hosts(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=2",
        "--master_addr=127.0.0.1",
    ]
    launch += [f"--master_port={port}"]
    hosts = [
        subprocess.Popen(
            [*launch, f"--node_rank={node}", str(SCRIPT), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [host.communicate(timeout=100)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
