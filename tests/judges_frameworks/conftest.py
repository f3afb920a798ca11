"""Frameworks judge checkpoints. They are imported once, and forked for every world of ranks."""

import os

# before a framework is imported: no GPU, nothing from a network, no messages but errors, one thread per rank
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
os.environ |= {"DEEPSPEED_LOG_LEVEL": "error"}
