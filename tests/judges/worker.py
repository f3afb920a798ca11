"""What vLLM's workers are given for the judges: methods that `collective_rpc` calls on every one of them."""

import shardwise as sw
from shardwise.engines import vllm as adapter


class Synced:
    """A worker extension: its methods become methods of vLLM's worker."""

    recorded = None

    def sync_from(self, folder: str) -> str:
        """Fill the running model from a checkpoint; how names got there."""
        model = self.model_runner.model
        if self.recorded is None:
            self.recorded = adapter.record(model, folder)
        with adapter.reload(model, self.recorded, self.vllm_config):
            sw.checkpoint.load(folder, into=self.recorded)
        return str(self.recorded.explanation).splitlines()[0]

    def fail_to_sync(self, folder: str) -> str:
        """A sync that is cut off in the middle; what the error says."""
        model = self.model_runner.model
        self.recorded = adapter.record(model, folder)
        try:
            with adapter.reload(model, self.recorded, self.vllm_config):
                sw.checkpoint.load(folder, into=self.recorded)
                raise ConnectionError("the trainer is gone")
        except ConnectionError as error:
            return error.__notes__[-1]

    def reload_other(self, folder: str) -> str:
        """A recording whose parameters had another shape; what the error says."""
        model = self.model_runner.model
        recorded = adapter.record(model, folder)
        name = next(iter(recorded._seen))
        recorded._seen[name] = "shape [1, 2, 3]"
        try:
            with adapter.reload(model, recorded, self.vllm_config):
                raise AssertionError("not refused")
        except sw.ShardwiseError as error:
            return str(error)
