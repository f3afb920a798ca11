"""Trains a tiny Llama under FSDP2 on two ranks and serves it in vLLM, synced after every few steps. It learns to count.

    python examples/train_and_serve.py

takes vLLM (`make judges` installs its CPU build into .venv-judges) and no GPU. The driver starts two jobs that know
nothing of each other but a file to meet at: trainers (this script again, under torchrun) and a vLLM engine, whose
workers get the methods of `Serving`. They stay the same for an engine with more ranks (tensor_parallel_size=).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw

TRAINERS, SYNCS, STEPS, VOCABULARY = 2, 3, 8, 64


def joined(meeting, rank, size):
    """One group over trainers and workers, which have default groups of their own."""
    store = dist.FileStore(meeting, size)
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


class Serving:
    """Methods that vLLM adds to its workers (worker_extension_cls), called on all of them by collective_rpc."""

    sync = None

    def meet_trainers(self, folder, meeting):
        """Once: record where this engine's loader puts each tensor, and join the trainers."""
        self.target = sw.engines.vllm.record(self.model_runner.model, folder)
        self.group = joined(meeting, TRAINERS + dist.get_rank(), TRAINERS + dist.get_world_size())
        return str(sw.engines.explain(self.target)).splitlines()[0]

    def receive_weights(self):
        """After every few steps, while the trainers call `run`, too. The first time both sides plan the sync."""
        with sw.engines.vllm.reload(self.model_runner.model, self.target, self.vllm_config):
            self.sync = self.sync or sw.Resharder(None, self.target, group=self.group, cast=True)
            self.sync.run()


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, head_dim=32))


def train(meeting, workers):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = tiny_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    group = joined(meeting, dist.get_rank(), TRAINERS + int(workers))
    sync = sw.Resharder(model.state_dict(), None, group=group, cast=True)
    for _ in range(SYNCS):
        for _ in range(STEPS):
            first = torch.randint(VOCABULARY, (16, 1))
            numbers = (first + torch.arange(12)) % VOCABULARY
            model(numbers, labels=numbers).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.run()
    dist.barrier()
    dist.destroy_process_group()


def count_on(llm):
    """What the engine says after 7, 8, 9."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=5, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": [7, 8, 9]}], greedy, use_tqdm=False)
    return answer.outputs[0].token_ids


def main(folder):
    from vllm import LLM

    meeting = str(Path(folder) / "meeting")
    tiny_llama().save_pretrained(folder)  # the engine starts with untrained weights
    plain = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "dtype": "bfloat16"}
    plain["use_tqdm_on_load"] = False
    llm = LLM(folder, worker_extension_cls="train_and_serve.Serving", tensor_parallel_size=1, **plain)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(TRAINERS)]
    trainers = subprocess.Popen([*torchrun, __file__, meeting, "1"])
    try:
        print(*llm.collective_rpc("meet_trainers", args=(folder, meeting)), flush=True)
        print("untrained:", *count_on(llm), flush=True)
        for sync in range(SYNCS):
            llm.collective_rpc("receive_weights")  # between two calls of generate: no request is running
            llm.reset_prefix_cache()  # cached keys and values are of the weights before
            print(f"after {STEPS * (sync + 1)} steps:", *count_on(llm), flush=True)
        assert trainers.wait(60) == 0
    finally:
        trainers.kill()


if __name__ == "__main__":
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import of vLLM less; it works without this, too
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
