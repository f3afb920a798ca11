"""A running vLLM engine in a process of its own, forked from one that has imported vLLM."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vllm import LLM, SamplingParams

T = TypeVar("T")
PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 5]}, {"prompt_token_ids": [7, 8, 9]}]
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=128, detokenize=False, ignore_eos=True)
Tokens = list[tuple[list[int], list[dict[int, float]]]]  # for each prompt: tokens, and log-probabilities of all others


def engine(folder: Path, ranks: int = 1) -> LLM:
    """An engine that serves a folder."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_logprobs": 128, "tensor_parallel_size": ranks}
    plain = {"enforce_eager": True, "skip_tokenizer_init": True, "use_tqdm_on_load": False, "dtype": "bfloat16"}
    return LLM(str(folder), worker_extension_cls="worker.Synced", **sizes, **plain)


def answers(llm: LLM) -> Tokens:
    """Greedy tokens, with the log-probabilities of the whole vocabulary."""
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [(list(one.token_ids), [_plain(step) for step in one.logprobs]) for one in outputs]


def _plain(step) -> dict[int, float]:
    return {token: one.logprob for token, one in sorted(step.items())}


def in_process(work: Callable[[], T], timeout: float = 400) -> T:
    """The result of a function in a forked process. An error there is an error here."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_report, args=(work, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(timeout), f"no result after {timeout} s"
        result, error = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert not error, error
    return result


def _report(work: Callable[[], T], sender) -> None:
    try:
        sender.send((work(), ""))
    except BaseException:
        sender.send((None, traceback.format_exc()))
    os._exit(0)
