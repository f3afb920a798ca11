"""load by all ranks of a group: nobody returns before all have read."""

import shutil
import time

import pytest
import torch
import torch.distributed as dist

from shardwise import checkpoint
from shardwise.checkpoint import filling
from shardwise.testing import on_ranks


@pytest.mark.parametrize("options", [{"read": "once"}, {"group": True}, {"group": True, "read": "each"}], ids=str)
def test_files_may_be_deleted_as_soon_as_load_returns(tmp_path, monkeypatch, options):
    path, flags = tmp_path / "saved", tmp_path / "flags"
    values = {"w": torch.arange(6.0), "step": 7}
    checkpoint.save(values, path)
    flags.mkdir()

    def late(load):
        """The first rank is done with its tensors long after the others."""

        def wrapped(*args, **options):
            found = load(*args, **options)
            if dist.get_rank() == 0:
                time.sleep(0.3)
                (flags / "done").touch()
            return found

        return wrapped

    monkeypatch.setattr(filling.Job, "run", late(filling.Job.run))
    monkeypatch.setattr(filling, "read_into", late(filling.read_into))

    def run(rank):
        group = {"group": dist.group.WORLD} if "group" in options else {}
        into = {"w": torch.zeros(6), "step": 0}
        checkpoint.load(path, into, **{**options, **group})
        assert (flags / "done").exists()
        if rank == 1:
            shutil.rmtree(path)
        torch.testing.assert_close(into, values)

    on_ranks(2, run)
